"""The benchmark command on the CPU with tiny shapes, and the arithmetic behind its figures."""

from __future__ import annotations

import pytest
import torch

from spec_compile.bench.shards import (
    RankAttention,
    Shape,
    causal_pairs,
    packed_lengths,
    useful_flops,
)
from spec_compile.bench.timing import Timing
from spec_compile.cli import main
from spec_compile.runtime.layout import plan_layout

TINY = Shape(4, 2, 16, torch.float32)


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (["attention", "--cp", "1", "2", "--documents", "one", "packed"], 9),
        (["eagle3", "--cp", "2", "--passes", "3"], 4),
        (["merge"], 2),
        pytest.param(["tap"], 7, marks=pytest.mark.slow),
    ],
)
def test_the_command_prints_a_row_a_case(
    arguments: list[str], lines: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments, "--quick", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == lines
    assert "nan" not in printed[-1]


@pytest.mark.parametrize("total", [64, 1000, 131072])
def test_packed_lengths_fill_the_row_with_unequal_documents(total: int) -> None:
    lengths = packed_lengths(total)
    assert sum(lengths) == total
    assert min(lengths) >= 1
    assert len(set(lengths)) > 3


def test_useful_work_counts_visible_pairs_only() -> None:
    assert causal_pairs([1, 3]) == 7
    assert useful_flops(TINY, [1, 3]) == (4 * 7 * 4 * 16, 10 * 7 * 4 * 16)


@pytest.mark.parametrize("strategy", ["all_gather", "ring"])
def test_ranks_run_alone_cover_the_whole_row(strategy: str) -> None:
    """Equal keys of equal values everywhere: every row's output is that value."""
    lengths = (13, 1, 40)
    layout = plan_layout(lengths, 3)
    cpu = torch.device("cpu")
    for rank in range(3):
        work = RankAttention(TINY, lengths, 3, rank, cpu, strategy=strategy, backend="auto")
        fabric = work.context.fabrics["cp"]
        for x in [work.inputs[2], *(pair[1] for pair in fabric._held)]:  # type: ignore[attr-defined]
            x.data.fill_(2.0)
        out = work.forward()
        live = torch.from_numpy(layout.rows(rank) < sum(lengths))
        torch.testing.assert_close(out[live], torch.full_like(out[live], 2.0))
        work.backward(out)


def test_times_add_up() -> None:
    total = Timing.of([1.0, 3.0, 2.0]) + Timing(1.0, 0.5, 1.5)
    assert (total.median, total.low, total.high) == (3.0, 1.5, 4.5)
