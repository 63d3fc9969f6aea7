"""The benchmark command on the CPU with tiny shapes, and the arithmetic behind its figures."""

from __future__ import annotations

import json
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from spec_compile.bench import commands, processes, tap_cuda
from spec_compile.bench.attention import measure_passes
from spec_compile.bench.blocks import BlockRank, Blocks
from spec_compile.bench.eagle3 import Eagle3Rank, needed_bytes
from spec_compile.bench.launch import covered
from spec_compile.bench.peers.flex import FlexRank, block_mask, block_mask_of, causal_mask
from spec_compile.bench.replay import ReplayFabric
from spec_compile.bench.rows import Settings
from spec_compile.bench.shards import Shape, causal_pairs, flops_of, packed_lengths
from spec_compile.bench.timing import Timing
from spec_compile.cli import main
from spec_compile.errors import ChannelError, ConfigError
from spec_compile.ir.reference import branch_attention
from spec_compile.runtime.layout import plan_layout
from tests.ranks import run_processes

TINY = Shape(4, 2, 16, torch.float32)
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("arguments", "rows"),
    [
        pytest.param(
            ["attention", "--cp", "1", "2", "--documents", "one", "packed"],
            8,
            marks=pytest.mark.slow,
        ),
        # one device, three strategies, two splits of the peer, and repeated heads
        pytest.param(["eagle3", "--cp", "1", "2", "--passes", "3"], 7, marks=pytest.mark.slow),
        (["blocks", "--cp", "1", "2"], 3),
        pytest.param(["blocks"], 7, marks=pytest.mark.slow),
        (["merge"], 1),
        (["launch"], 2),
        (["losses"], 4),
    ],
)
def test_the_command_prints_a_row_a_case(
    arguments: list[str], rows: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, table = tmp_path / "rows.json", tmp_path / "rows.md"
    files = ["--json", str(path), "--markdown", str(table)]
    assert main(["bench", *arguments, "--quick", "--device", "cpu", *files]) == 0
    printed = capsys.readouterr().out.splitlines()
    written = json.loads(path.read_text())
    assert printed[0] == f"$ {written['command']}"
    assert f"torch {torch.__version__}" in printed[1]
    assert printed == written["lines"]
    assert len(written["rows"]) == rows
    assert "nan" not in printed[-1]
    lines = table.read_text().splitlines()
    cases = [row for row in written["rows"] if row["kind"] == "Row"]
    columns = {line.count("|") for line in lines if line.startswith("|")}
    assert sum(line.startswith("|") for line in lines) == len(cases) + 2 * bool(cases)
    assert len(columns) == bool(cases), "every row of a table has as many cells"
    others = [line for line in lines if not line.startswith("|") and line not in ("", "```")]
    assert len(others) + len(cases) + bool(cases) == len(printed)


@pytest.mark.slow
@pytest.mark.dist
def test_taps_are_measured_between_two_processes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "tap", "--quick", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert sum("GB/s" in line or " us" in line for line in printed) >= 2
    assert printed[-2].split()[0] == "64"
    assert printed[-1].startswith("goals, on GPUs: ")


def test_every_figure_of_taps_stands_beside_its_goal() -> None:
    fast, slow, raw = (Timing(x, x, x) for x in (350.0, 300.0, 360.0))
    rows = [
        tap_cuda.TapRow(4, raw, slow, fast), tap_cuda.TapRow(32, raw, fast, fast),
        tap_cuda.TapRow(128, raw, slow, Timing(10, 9, 11)),
    ]  # fmt: skip
    told = list(tap_cuda.judge(rows, Timing(50, 40, 70), num_gpus=2))
    assert [line.rpartition(", ")[2] for line in told] == [
        *2 * ("not judged",), *("met", "met"), *("MISSED", "MISSED"), "met",
    ]  # fmt: skip
    assert told[2].endswith("at least 85 %; 32 MiB: 97.22 %, met")
    assert told[0].startswith("goal from 32 MiB on: bandwidth, of a raw copy")
    assert told[0].endswith("at least 85 %; 4 MiB: 83.33 %, not judged")
    assert told[-1] == "goal: latency of 4 MiB between two GPUs at most 60 us; median: 50 us, met"
    alone = list(tap_cuda.judge(rows, Timing(50, 40, 70), num_gpus=1))
    assert [line.rpartition(", ")[2] for line in alone[:-1]] == [
        *4 * ("not judged",), *("MISSED", "met"),
    ]  # fmt: skip
    assert alone[-1].startswith("not judged, as there is one GPU: bandwidth a direction")


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(("benchmark", "peers"), [("attention", 0), ("eagle3", 2)])
def test_processes_measure_the_exchange_beside_each_rank_alone(
    benchmark: str, peers: int, tmp_path: Path
) -> None:
    path = tmp_path / "rows.json"
    arguments = [
        "--quick",
        "--device",
        "cpu",
        "--passes",
        "2",
        "--strategy",
        "ring",
        "--json",
        str(path),
    ]

    def run(rank: int) -> int:
        return main(["bench", benchmark, *arguments])

    assert run_processes(2, run) == [0, 0]
    rows = json.loads(path.read_text())["rows"]
    assert [row["what"] for row in rows[:2]] == ["ring, each rank alone", "ring, gloo"]
    assert len(rows) == 2 + peers
    assert rows[0]["sent"] == rows[1]["sent"]
    assert all(min(row["sent"]) > 0 for row in rows)
    assert all(row["cp"] == 2 and row["total"]["median"] > 0 for row in rows)


@pytest.mark.slow
@pytest.mark.dist
def test_rows_of_processes_come_as_they_are_measured(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    arguments = ["--quick", "--device", "cpu", "--strategy", "ring", "--json", str(path)]

    def run(rank: int) -> None:
        broken = mock.patch.object(processes, "fabric_name", side_effect=ChannelError("no link"))
        with broken, pytest.raises(ChannelError, match="no link"):
            main(["bench", "attention", *arguments])

    run_processes(2, run)
    rows = json.loads(path.read_text())["rows"]
    assert [row["what"] for row in rows] == ["ring, each rank alone"]


def test_a_measurement_that_stands_still_shows_where(capfd: pytest.CaptureFixture[str]) -> None:
    with mock.patch.object(processes, "LATE_S", 0.05), processes.stacks_when_late():
        time.sleep(0.2)
    assert "in test_a_measurement_that_stands_still_shows_where" in capfd.readouterr().err


@pytest.mark.parametrize("total", [64, 1000, 131072])
def test_packed_lengths_fill_the_row_with_unequal_documents(total: int) -> None:
    lengths = packed_lengths(total)
    assert sum(lengths) == total
    assert min(lengths) >= 1
    assert len(set(lengths)) > 3


def test_useful_work_counts_visible_pairs_only() -> None:
    assert causal_pairs([1, 3]) == 7
    assert flops_of(TINY, 7) == (4 * 7 * 4 * 16, 10 * 7 * 4 * 16)


@pytest.mark.parametrize("strategy", ["all_gather", "ring", "pass_q"])
@pytest.mark.parametrize("passes", [1, 3])
def test_ranks_run_alone_cover_the_whole_row(strategy: str, passes: int) -> None:
    """Equal values everywhere: every row's output is that value, and each rank sees all of them."""
    lengths = (13, 1, 40)
    layout = plan_layout(lengths, 3)
    for rank in range(3):
        fabric = ReplayFabric("cp", rank, 3, CPU)
        work = Eagle3Rank(
            TINY, layout, lengths, fabric, CPU, strategy=strategy, backend="auto", passes=passes
        )
        for x in work._values:
            x.fill_(2.0)
        fabric.fill(2.0, work._queries[0])
        outs = work.forward()
        live = torch.from_numpy(layout.rows(rank) < sum(lengths))
        assert len(outs) == passes
        for out in outs:
            torch.testing.assert_close(out[live], torch.full_like(out[live], 2.0))
        work.backward(outs)


def test_one_exchange_of_the_main_keys_serves_all_passes() -> None:
    settings = Settings(TINY, CPU, repeats=1, budget_s=0.1, all_ranks=False)
    rows = [
        measure_passes(settings, "", (64,), 4, strategy=strategy, passes=passes)
        for strategy in ("all_gather", "ring")
        for passes in (1, 3)
    ]
    keys_and_values = 3 * 16 * 2 * 2 * 16 * 4
    assert [row.sent[0] // keys_and_values for row in rows] == [1, 1, 1, 3]
    assert rows[0].sent[1] == rows[1].sent[1] == keys_and_values


def test_what_must_be_saved_counts_every_pass_and_the_main_keys_once() -> None:
    """Three rows of two ranks' six, two passes, fp32: q and out 512 bytes a row, a key and value 256, lse 16."""
    q_and_out, pair, lse = 2 * 4 * 16 * 4, 2 * 2 * 16 * 4, 4 * 4
    assert needed_bytes(TINY, 3, 6, 2) == 2 * 3 * (q_and_out + pair + lse) + 6 * pair


def test_blocks_equal_the_declared_operator_on_every_rank() -> None:
    lengths = (50, 30, 48)
    blocks = Blocks.drawn(lengths, 6, 4, CPU)
    group = torch.arange(6).repeat_interleave(4)
    limit = blocks.anchors.repeat_interleave(4)
    rank = BlockRank(TINY, blocks, ReplayFabric("cp", 0, 1, CPU), CPU, backend="auto")
    q, keys, values = rank.whole()
    expected = branch_attention(
        q, keys[:128], values[:128], [(keys[128:], values[128:], group, group)],
        q_limit=limit, q_document=blocks.document[limit], k_document=blocks.document,
        scale=16**-0.5, window=None, sinks=None,
    )  # fmt: skip
    torch.testing.assert_close(rank.forward()[0], expected)
    sizes = [
        BlockRank(TINY, blocks, ReplayFabric("cp", r, 3, CPU), CPU, backend="auto").forward()[0]
        for r in range(3)
    ]
    assert sum(len(out) for out in sizes) == 24
    visible = (blocks.document[None] == blocks.document[limit][:, None]) & (
        torch.arange(128)[None] < limit[:, None]
    )
    assert blocks.pairs == int(visible.sum()) + 24 * 4


def test_flex_attention_is_given_the_same_masks() -> None:
    lengths = (50, 30, 48)
    blocks = Blocks.drawn(lengths, 6, 4, CPU)
    rank = BlockRank(TINY, blocks, ReplayFabric("cp", 0, 1, CPU), CPU, backend="auto")
    with torch.no_grad():
        peer = FlexRank(*rank.whole(), block_mask(blocks), compiled=False)
        found = peer.forward()[0][0].transpose(0, 1)
        torch.testing.assert_close(found, rank.forward()[0])
        q, k, v = (torch.randn(128, heads, 16) for heads in (4, 2, 2))
        found = FlexRank(q, k, v, causal_mask(blocks.document), compiled=False).forward()[0][0]
        expected = branch_attention(
            q, k, v, (), q_limit=torch.arange(128) + 1, q_document=blocks.document,
            k_document=blocks.document, scale=16**-0.5, window=None, sinks=None,
        )  # fmt: skip
        torch.testing.assert_close(found.transpose(0, 1), expected)


def test_flex_attention_is_given_the_tiles_that_torch_would_make() -> None:
    lengths = (700, 1, 350)
    blocks = Blocks.drawn(lengths, 24, 16, CPU)
    for mask, rows, keys in (
        (causal_mask(blocks.document), 1051, 1051),
        (block_mask(blocks), 24 * 16, 1051 + 24 * 16),
    ):
        expected = create_block_mask(mask, None, None, rows, keys, device="cpu")
        found = block_mask_of(mask, rows, keys, CPU)
        assert found.shape == expected.shape
        torch.testing.assert_close(found.to_dense(), expected.to_dense())
        for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
            torch.testing.assert_close(getattr(found, name), getattr(expected, name))


def test_overlapping_kernels_are_counted_once() -> None:
    assert covered([(5.0, 7.0), (0.0, 2.0), (1.0, 4.0), (5.5, 6.0)]) == 6.0
    assert covered([]) == 0.0


def test_a_timing_is_a_median_with_its_spread() -> None:
    timing = Timing.of([1.0, 3.0, 2.0])
    assert (timing.median, timing.low, timing.high) == (2.0, 1.0, 3.0)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["merge", "--device", "tpu"], "--device must be 'cpu' or 'cuda', found 'tpu'"),
        (["merge", "--device", "cuda:99"], "--device cuda:99 is not here: torch finds"),
        (
            ["merge", "--device", "cpu", "--dtype", "half2"],
            "--dtype must be a floating torch.dtype",
        ),
        (["blocks", "--device", "cpu", "--cp", "3", "32"], "--cp 3 32 and needs 96 or more"),
        (["merge", "--device", "cpu", "--repeats", "0"], "--repeats must be 1 or more, found 0"),
        (["losses", "--device", "cpu", "--tokens", "-3"], "--tokens must be 1 or more, found -3"),
        (["losses", "--device", "cpu", "--vocab", "0"], "--vocab must be 1 or more, found 0"),
        (["tap", "--device", "cpu", "--hidden", "64", "0"], "--hidden must be 1 or more, found 0"),
        (
            ["losses", "--device", "cpu", "--dtype", "int64"],
            "--dtype must be a floating torch.dtype",
        ),
        (
            ["attention", "--device", "cpu", "--fabric", "gloo", "nccl"],
            "--fabric nccl needs --device cuda",
        ),
    ],
    ids=[
        "unknown",
        "absent",
        "dtype",
        "anchors",
        "repeats",
        "tokens",
        "vocab",
        "hidden",
        "integers",
        "fabric",
    ],
)
def test_what_the_command_cannot_measure_is_said_in_one_line(
    arguments: list[str], match: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments, "--quick"]) == 2
    told = capsys.readouterr().err.splitlines()
    assert len([line for line in told if line.startswith("spec-compile bench: ")]) == 1
    assert match in told[-1]


@pytest.mark.parametrize("benchmark", ["tap", "launch", "losses", "merge", "blocks"])
def test_what_is_measured_in_one_process_is_not_started_by_torchrun(
    benchmark: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["bench", benchmark, "--quick", "--device", "cpu"]) == 2
    assert "start it without torchrun" in capsys.readouterr().err


def test_blocks_are_as_many_as_can_be_dealt_evenly_to_every_number_of_ranks() -> None:
    assert commands._even(16, [1, 2, 4, 8]) == 16
    assert commands._even(23, [2, 3]) == 18
    with pytest.raises(ConfigError, match="found 6"):
        commands._even(6, [1, 2, 4, 8])
