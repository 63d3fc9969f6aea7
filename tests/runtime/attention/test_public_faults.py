"""Faults that other context-parallel implementations were reported for, as cases of ours.

Every case runs under each strategy against dense attention in float64, forward, log-sum-exp and all gradients;
rows lie where the layout planner puts them.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from spec_compile.runtime.layout import plan_layout

from .cases import Case, by_mask, make_case, on_ranks

STRATEGIES = ["local", "ring", "pass_q"]
"""The first is what runs behind a gather of keys and values."""


@dataclass(frozen=True)
class Fault:
    """One packed row on so many ranks."""

    lengths: tuple[int, ...]
    cp: int
    options: dict[str, Any] = field(default_factory=dict)


FAULTS = {
    "a01 a document of even length that cp does not divide": Fault(
        (698,), 4, {"kinds": "dd", "heads": (2, 1), "dims": (8, 8)}
    ),
    "a02 the last token of an odd document beside another": Fault((4, 3), 2),
    "a02 the last token of an odd document": Fault((7,), 2),
    "a05 unfriendly lengths": Fault((37, 141, 9, 3, 1, 70), 8, {"heads": (2, 1)}),
    "a07 a document shorter than its chunks": Fault((3,), 4),
    "a07 as many one-token documents as chunks": Fault((1,) * 16, 8),
    "a09 one document": Fault((64,), 4),
    "a09 the same kernels on packed documents": Fault((7, 21, 1, 35), 4),
    "a11 empty documents, one key head": Fault((0, 12, 0, 0, 20, 0), 2, {"heads": (4, 1), "dims": (128, 128)}),
    "a11 empty documents, head dim 256": Fault((0, 12, 0, 0, 20, 0), 2, {"heads": (4, 1), "dims": (256, 256)}),
    "a12 shards that are padded": Fault((31,), 4, {"wide": True, "kinds": "r"}),
    "a16 rows that see neither keys nor branches": Fault((9, 12), 3, {"blind": True}),
    "a21 values narrower than keys": Fault((5, 14), 3, {"dims": (24, 16), "kinds": "d"}),
    "a23 sinks": Fault((37, 91), 2, {"heads": (8, 2), "sinks": True}),
    "a25 one sink for five parts": Fault((40,), 4, {"kinds": "ddd", "sinks": True}),
    "a26 a layer without a window": Fault((4, 8, 150), 2),
    "a26 a windowed layer on the same row": Fault((4, 8, 150), 2, {"window": 38}),
    "a28 documents around a window's length": Fault((24, 48, 49, 120), 2, {"window": 48, "heads": (2, 1)}),
    "a29 a scale of its own": Fault((9, 30), 2, {"kinds": "dg", "dims": (64, 64), "scale": 0.3}),
}  # fmt: skip


def planned(fault: Fault) -> Case:
    slots = torch.from_numpy(plan_layout(fault.lengths, fault.cp).slots)
    return make_case(fault.lengths, fault.cp, slots=slots, **fault.options)


@functools.cache
def dense(name: str) -> tuple[Case, tuple[Tensor, Tensor, dict[str, Tensor]]]:
    case = planned(FAULTS[name])
    return case, by_mask(case)


def assert_equal(case: Case, cp: int, strategy: str, wanted: Any) -> None:
    """Compare piece by piece, so that a failure names the rank and the half of its rows."""
    found = on_ranks(case, cp, strategy)
    n = len(case.slots) // cp
    halves = case.slots.view(cp, n).tensor_split(2, dim=1)
    for what, got, want in [
        ("out", found[0], wanted[0]),
        ("lse", found[1], wanted[1]),
        *((f"gradient of {name}", found[2][name], wanted[2][name]) for name in wanted[2]),
    ]:
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10, msg=lambda text, what=what: (  # type: ignore[misc]
            f"{what}: {text}"
        ))  # fmt: skip
        if len(got) == len(case.slots):
            for half, rows in enumerate(halves):
                for rank in range(cp):
                    piece = f"{what}, rank {rank}, half {half}"
                    assert torch.allclose(got[rows[rank]], want[rows[rank]], atol=1e-9), piece


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", FAULTS)
def test_a_reported_fault_is_not_ours(name: str, strategy: str) -> None:
    case, wanted = dense(name)
    assert_equal(case, FAULTS[name].cp, strategy, wanted)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("cp", [1, 2, 3, 4, 8])
def test_everything_at_once_at_every_size(cp: int, strategy: str) -> None:
    fault = Fault(
        (7, 21, 1, 35, 0, 3), cp, {"kinds": "dgrd", "window": 9, "sinks": True, "dims": (24, 16)}
    )
    case = planned(fault)
    assert_equal(case, cp, strategy, by_mask(case))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("lengths", "cp"), [((2999,), 4), ((137, 2041, 89, 3, 1, 700), 8)])
def test_a03_a05_long_rows_that_cp_does_not_divide(
    lengths: tuple[int, ...], cp: int, strategy: str
) -> None:
    case = planned(Fault(lengths, cp, {"heads": (1, 1), "dims": (8, 8), "kinds": "d"}))
    assert_equal(case, cp, strategy, by_mask(case))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("cp", [2, 3, 8])
def test_a08_a_bidirectional_layer_on_the_layout_of_causal_ones(cp: int, strategy: str) -> None:
    lengths = (10, 1, 23)
    case = planned(Fault(lengths, cp))
    ends = torch.tensor([sum(lengths[: i + 1]) for i in range(len(lengths))] + [sum(lengths)])
    case.limit = ends[case.document.clamp(max=len(lengths))]
    assert_equal(case, cp, strategy, by_mask(case))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a10_what_was_prepared_for_another_size_is_not_used(strategy: str) -> None:
    for cp in (1, 2, 1, 4, 2):
        case = planned(Fault((9, 14, 3), cp, {"kinds": "d"}))
        assert_equal(case, cp, strategy, by_mask(case))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a11_empty_documents_change_no_bit(strategy: str) -> None:
    outs = []
    for lengths in ((0, 12, 0, 0, 20, 0), (12, 20)):
        out, _, grads = on_ranks(planned(Fault(lengths, 2, {"heads": (4, 1)})), 2, strategy)
        outs.append([out, *grads.values()])
    assert all(torch.equal(a, b) for a, b in zip(*outs, strict=True))


@pytest.mark.parametrize("strategy", ["ring", "pass_q"])
def test_a22_two_runs_give_the_same_bits(strategy: str) -> None:
    case = planned(Fault((7, 21, 1, 35), 4, {"kinds": "d", "sinks": True}))
    first, second = (on_ranks(case, 4, strategy, dtype=torch.float32) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert all(torch.equal(first[2][name], second[2][name]) for name in first[2])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a24_every_head_has_its_own_sink(strategy: str) -> None:
    case = planned(Fault((11, 6), 2, {"heads": (8, 2), "sinks": True}))
    with torch.no_grad():
        case.leaves["sinks"].copy_(torch.arange(1, 9))
    right = by_mask(case)
    assert_equal(case, 2, strategy, right)
    with torch.no_grad():
        case.leaves["sinks"][[2, 5]] = case.leaves["sinks"][[5, 2]]
    assert float((on_ranks(case, 2, strategy)[0] - right[0]).abs().max()) > 1e-3


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a28_a_window_changes_rows_behind_it_alone(strategy: str) -> None:
    lengths, window = (24, 48, 49, 120), 48
    plain, windowed = (
        on_ranks(planned(Fault(lengths, 2, {"heads": (2, 1), "window": w})), 2, strategy)[0]
        for w in (-1, window)
    )
    position = torch.cat([torch.arange(n) for n in lengths])
    differs = ((plain - windowed).abs() > 1e-9).flatten(1).any(1)[: len(position)]
    assert torch.equal(differs, position >= window)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a18_errors_grow_no_faster_than_the_root_of_the_ranks(strategy: str) -> None:
    def errors(cp: int, dtype: torch.dtype) -> dict[str, float]:
        case = planned(Fault((96,), cp, {"heads": (4, 2), "dims": (32, 32)}))
        with torch.no_grad():
            for x in case.leaves.values():
                x.copy_(x.to(dtype))
            case.cotangent = case.cotangent.to(dtype).double()
        want, _, wants = by_mask(case)
        got, _, grads = on_ranks(case, cp, strategy, dtype=dtype)
        pairs = {"out": (got, want)} | {name: (grads[name], wants[name]) for name in wants}
        return {
            name: float((a - b).square().mean().sqrt() / b.square().mean().sqrt())
            for name, (a, b) in pairs.items()
        }

    for dtype in (torch.bfloat16, torch.float32):
        alone = errors(1, dtype)
        for cp in (2, 4, 8):
            for name, error in errors(cp, dtype).items():
                assert error <= min(2.0, math.sqrt(cp)) * alone[name], (dtype, cp, name)
