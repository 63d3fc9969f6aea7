"""The cost model: what it says is sent is what fabrics send, and what is chosen is what sends least."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from spec_compile.analysis.choice import choose
from spec_compile.analysis.cost import STRATEGIES, AttentionSize, predict
from spec_compile.analysis.hardware import CPU, H200
from spec_compile.ir.traffic import EITHER
from spec_compile.plan import Plan
from spec_compile.runtime.context import RunContext, bind
from spec_compile.runtime.layout import plan_layout
from spec_compile.runtime.threads import ThreadFabric, thread_worlds
from tests.ranks import run_threads
from tests.runtime.attention.cases import make_case, on_ranks

SIZE = AttentionSize.causal([32768])


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Bytes that each rank sends."""
    counts: Counter[int] = Counter()
    post = ThreadFabric._post

    def count(self: ThreadFabric, x: torch.Tensor, dst: int, lane: int) -> None:
        counts[self.rank] += x.numel() * x.element_size()
        post(self, x, dst, lane)

    monkeypatch.setattr(ThreadFabric, "_post", count)
    return counts


@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("strategy", ["ring", "pass_q"])
def test_predicted_bytes_are_those_sent(strategy: str, cp: int, sent: Counter[int]) -> None:
    length = 16 * cp
    case = make_case((length,), cp, slots=torch.from_numpy(plan_layout([length], cp).slots))
    on_ranks(case, cp, strategy, dtype=torch.float32)
    size = AttentionSize.causal([length], heads=4, kv_heads=2, head_dim=16, itemsize=4)
    mean = sum(sent.values()) / cp
    assert mean == predict(strategy, size, cp).bytes


def test_predicted_bytes_of_one_gather_are_those_sent(sent: Counter[int]) -> None:
    cp, rows = 3, 8
    worlds = thread_worlds(Plan(cp=cp, timeout_s=20.0))

    def body(rank: int) -> None:
        with (
            bind(RunContext(worlds[rank].fabrics)),
            torch.autograd.set_multithreading_enabled(True),
        ):
            for width in (16, 12):
                x = torch.randn(rows, 2, width, requires_grad=True)
                torch.ops.spec_compile.gather_packed(
                    x, torch.arange(rows * cp), "cp"
                ).sum().backward()

    run_threads(cp, body)
    size = AttentionSize(4, 2, 16, 12, 4, rows * cp, rows * cp, 1)
    for readers in (1, 5):
        assert sent[0] == predict("all_gather", size, cp, readers=readers).bytes


@pytest.mark.parametrize(
    ("lengths", "heads"),
    [
        ((64,), (4, 1)),
        ((64,), (4, 4)),
        ((30, 20, 14), (4, 2)),
        ((8,) * 8, (4, 1)),
        ((9, 1), (2, 2)),
    ],
)
def test_each_micro_batch_goes_the_way_that_sends_fewer_bytes_where_keys_are_even(
    lengths: tuple[int, ...], heads: tuple[int, int], sent: Counter[int]
) -> None:
    cp = 4
    slots = torch.from_numpy(plan_layout(lengths, cp, by_keys=True).slots)
    case = make_case(lengths, cp, slots=slots, heads=heads)
    busiest = {}
    for strategy in ("ring", "pass_q", EITHER):
        sent.clear()
        on_ranks(case, cp, strategy, dtype=torch.float32)
        busiest[strategy] = max(sent.values(), default=0)
    assert busiest[EITHER] == min(busiest["ring"], busiest["pass_q"])


def test_documents_that_are_whole_on_one_rank_send_nothing_by_visits(sent: Counter[int]) -> None:
    lengths = (8,) * 8
    case = make_case(lengths, 4, slots=torch.from_numpy(plan_layout(lengths, 4).slots))
    on_ranks(case, 4, "pass_q")
    assert not sent


@pytest.mark.parametrize("hardware", [H200, CPU])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_rank_sends_nothing_and_more_ranks_take_less_time(strategy: str, hardware: Any) -> None:
    alone = predict(strategy, SIZE, 1, hardware=hardware)
    assert (alone.bytes, alone.forward_exchange_ms, alone.held_bytes) == (0, 0.0, 0)
    times = [predict(strategy, SIZE, cp, hardware=hardware).total_ms for cp in (1, 2, 4, 8)]
    assert times == sorted(times, reverse=True)


def test_compute_is_flops_over_the_rate_and_what_tiles_add() -> None:
    found = predict("all_gather", SIZE, 1)
    flops = 32768 * 32769 // 2 * 32 * 128
    assert found.flops == 14 * flops
    floor = 4 * flops / H200.forward_tflops / 1e9
    assert floor < found.forward_compute_ms < 1.02 * floor


def test_an_exchange_that_tiles_cannot_hide_is_seen() -> None:
    slow = replace(H200, link_gb_s=1.0)
    for strategy in STRATEGIES:
        found = predict(strategy, SIZE, 4, hardware=slow)
        assert found.forward_ms > found.forward_bytes / 1e6
        assert found.forward_ms > predict(strategy, SIZE, 4).forward_ms


def test_readers_of_one_pair_share_a_gather_and_a_single_one_never_gathers() -> None:
    assert [c.strategy for c in choose([SIZE] * 7, 8)] == ["all_gather"] * 7
    assert [c.strategy for c in choose([SIZE], 8)] == [EITHER]


def test_few_query_rows_are_expected_to_move_and_many_are_not() -> None:
    for rows, expected in ((512 * 4, "pass_q"), (32768, "ring")):
        size = replace(SIZE, queries=rows, pairs=rows * 16384)
        assert choose([size], 8)[0].planned == expected
