"""recompute="layers": the same bits for less memory, and nothing sent twice."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from spec_compile import ParallelModel, Plan

from .models import packed_batch
from .step_cases import VOCAB, batches, bound, check_step, clipped, gradients_of

PLANS = [Plan(pp=2, cp=2, micro_batches=2), Plan(micro_batches=2), Plan(pp=3, cp=1)]


@pytest.mark.parametrize("plan", PLANS, ids=["pp2cp2", "pp1", "pp3"])
def test_a42_recomputed_step_has_the_same_bits(plan: Plan) -> None:
    def body(model: ParallelModel, rank: int) -> Any:
        result = model.step(batches(1)[0], clipped)
        return result, gradients_of(model)

    kept = bound("qwen3", "eagle3", plan, body)
    again = bound("qwen3", "eagle3", dataclasses.replace(plan, recompute="layers"), body)
    for (result, grads), (other, others) in zip(kept, again, strict=True):
        assert result == other
        for name, grad in grads.items():
            same = others[name]
            assert (grad is None and same is None) or torch.equal(_whole(grad), _whole(same)), name


def _whole(grad: Tensor | None) -> Tensor:
    assert grad is not None
    return grad


@pytest.mark.parametrize("target", ["llama_tied", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_recomputed_step_equals_the_dense_step(target: str) -> None:
    check_step(target, "gated", Plan(cp=2, pp=2, micro_batches=3, recompute="layers"))


def test_a42_nothing_is_sent_twice() -> None:
    """Every message of a fabric and every push of a tap, counted with and without recomputing."""

    def body(model: ParallelModel, rank: int) -> tuple[int, int]:
        sent = [0, 0]
        fabrics = [f for name, f in model._world.fabrics.items() if name in ("cp", "pp")]
        for fabric in fabrics:
            counted(fabric, "_swap", sent, 0)
            counted(fabric, "_post", sent, 0)
        assert model._caller.taps is not None
        counted(model._caller.taps, "push", sent, 1)
        model.step(batches(1)[0], clipped)
        return sent[0], sent[1]

    plan = Plan(cp=2, pp=2, micro_batches=2)
    kept = bound("qwen3", "eagle3", plan, body)
    assert kept == bound("qwen3", "eagle3", dataclasses.replace(plan, recompute="layers"), body)
    assert all(messages > 0 for messages, _ in kept)
    assert [pushes for _, pushes in kept] == [2, 2, 0, 0]


def counted(owner: Any, name: str, counts: list[int], at: int) -> None:
    """Let calls of a method count themselves."""
    method = getattr(owner, name)

    def counting(*args: Any, **kwargs: Any) -> Any:
        counts[at] += 1
        return method(*args, **kwargs)

    setattr(owner, name, counting)


def test_rows_can_be_differentiated_twice() -> None:
    def body(model: ParallelModel, rank: int) -> tuple[Tensor, Tensor]:
        rows = model(batches(1)[0])
        logits = [p for n, p in model.target.named_parameters() if n.endswith("down_proj.weight")]
        first = torch.autograd.grad(rows.logprobs.sum(), logits, retain_graph=True)
        second = torch.autograd.grad(rows.logprobs.sum(), logits)
        model._ledger.restore()
        return first[0], second[0]

    (first, second), *_ = bound("qwen3", "none", Plan(recompute="layers"), body)
    assert torch.equal(first, second)
    assert float(first.abs().max()) > 0


def test_recomputing_keeps_less_memory() -> None:
    batch = packed_batch((601, 423), vocab=VOCAB, seed=3)

    def body(model: ParallelModel, rank: int) -> int:
        model.step(batch, clipped)  # gradients are there before memory is measured
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            model.step(batch, clipped)
        return peak_bytes(profiler)

    kept, again = (
        bound("qwen3_deep", "none", Plan(recompute=choice), body)[0]
        for choice in ("none", "layers")
    )
    assert again < 0.5 * kept, (again, kept)


def peak_bytes(profiler: Any) -> int:
    """The most bytes that were live at once, of those allocated while profiling."""
    changes = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(changes, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    assert peak > 0
    return int(peak)
