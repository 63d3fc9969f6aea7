"""Whole steps on all ranks of a plan, held to the dense oracle; each lowering is made once a session."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from spec_compile import ParallelModel, Plan, lower
from spec_compile.batch import PackedBatch
from spec_compile.contract import TokenOutputs
from spec_compile.drafts import DFlash, Eagle3
from spec_compile.lowering import Lowered

from .models import (
    FAMILIES,
    gated_draft,
    packed_batch,
    randomise,
    tiny_llama,
    tiny_of_family,
    tiny_qwen3,
    window_draft,
)
from .oracle import DenseResult, dense_step
from .parallel import run_lowered

T = TypeVar("T")
VOCAB = 53
TARGETS: dict[str, Callable[[], Any]] = {
    "qwen3": lambda: tiny_qwen3(layers=3, vocab=VOCAB),
    "qwen3_tied": lambda: tiny_qwen3(layers=3, vocab=VOCAB, tied=True),
    "qwen3_deep": lambda: tiny_qwen3(layers=8, vocab=VOCAB),
    "qwen3_deep_tied": lambda: tiny_qwen3(layers=8, vocab=VOCAB, tied=True),
    "llama": lambda: tiny_llama(layers=3, vocab=VOCAB),
    "llama_tied": lambda: tiny_llama(layers=3, vocab=VOCAB, tied=True),
    **{name: functools.partial(tiny_of_family, name) for name in FAMILIES},
    **{f"{n}_tied": functools.partial(tiny_of_family, n, tied=True) for n in FAMILIES},
    "llama_float32": lambda: tiny_llama(layers=3, vocab=VOCAB, dtype=torch.float32),
}
DRAFTS: dict[str, Callable[[Any], nn.Module | None]] = {
    "none": lambda target: None,
    "eagle3": lambda target: randomise(Eagle3.from_target(target, 3), 1),
    "dflash": lambda target: randomise(
        DFlash.from_target(target, 4, num_hidden_layers=2, anchors_per_document=5), 1
    ),
    "gated": lambda target: gated_draft(target, taps=(2, 0, 2)),
    "window": window_draft,
}
LENGTHS = ((7, 21, 1, 35, 0, 3), (4, 0, 9))
"""Documents of the two data-parallel ranks' batches."""


def clipped(rows: TokenOutputs) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO-style loss with an entropy bonus and sums of every kind."""
    ratio = (rows.logprobs - rows.fields["old_logprobs"]).exp()
    advantages = rows.fields["advantages"]
    gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    loss = -((gain + 0.01 * rows.entropy) * rows.mask).sum()
    named = {"ratio": (ratio * rows.mask).sum()}
    if ratio.numel():
        named |= {"ratio/max": ratio.max(), "ratio/min": ratio.min()}
    return loss, named


def batches(dp: int, *, dtype: torch.dtype = torch.float64, **options: Any) -> list[PackedBatch]:
    """One unfriendly batch a data-parallel rank."""
    return [
        packed_batch(lengths, vocab=VOCAB, seed=seed, dtype=dtype, **options)
        for seed, lengths in enumerate(LENGTHS[:dp], 1)
    ]


@functools.cache
def models(target: str, draft: str) -> tuple[Any, nn.Module | None]:
    """Target and draft by name; shared between tests, so never changed by one."""
    made = TARGETS[target]()
    return made, DRAFTS[draft](made)


@functools.lru_cache(
    maxsize=24
)  # 25,000 objects each, which every garbage collection walks through
def lowered_for(target: str, draft: str, plan: Plan) -> tuple[Any, nn.Module | None, Lowered]:
    return (*models(target, draft), lower(*models(target, draft), plan))


def bound(
    target: str, draft: str, plan: Plan, fn: Callable[[ParallelModel, int], T], timeout: float = 100
) -> list[T]:
    """Call ``fn(model, rank)`` on every rank of a plan, each with its own copies of both models."""
    torch.set_num_threads(1)  # ranks are threads already
    stages = plan.num_stages // plan.pp
    shape: dict[str, Any] = (
        {"schedule": "interleaved", "stages_per_rank": stages} if stages > 1 else {}
    )
    shape |= {"param_dtype": plan.param_dtype, "cp_strategy": plan.cp_strategy}
    structure = Plan(cp=plan.cp, pp=plan.pp, verify=False, **shape)
    made, drafted, lowered = lowered_for(target, draft, structure)
    lowered = dataclasses.replace(lowered, plan=plan)
    return run_lowered(lowered, made, drafted, fn, timeout=timeout)


def gradients_of(model: ParallelModel) -> dict[str, Tensor | None]:
    """Copies of the gradients of every parameter that this rank owns, by "policy." or "draft." name."""
    found: dict[str, Tensor | None] = {}
    for prefix, module in (("policy", model.target), ("draft", model.draft)):
        for name, parameter in module.named_parameters() if module is not None else ():
            if parameter.device.type == "meta":
                assert parameter.grad is None, f"{name} lies on another stage and has a gradient"
            else:
                grad = parameter.grad
                found[f"{prefix}.{name}"] = None if grad is None else grad.clone()
    return found


def joined(dense: DenseResult) -> dict[str, Tensor]:
    policy = {f"policy.{name}": grad for name, grad in dense.policy_grads.items()}
    return policy | {f"draft.{name}": grad for name, grad in dense.draft_grads.items()}


def assert_gradients(
    found: Sequence[dict[str, Tensor | None]],
    wanted: dict[str, Tensor],
    *,
    tolerance: float = 1e-9,
    factor: float = 1.0,
) -> None:
    """Every rank's gradients are the wanted ones, and every wanted one is on some rank."""
    owned = {name for rank in found for name in rank}
    # some gradients vanish exactly (a bias on keys): they are held to the size of all others
    floor = max(1e-6, 10 * tolerance) * max(
        (float(w.abs().max()) for w in wanted.values() if w.numel()), default=0.0
    )
    assert set(wanted) <= owned, f"on no rank: {sorted(set(wanted) - owned)}"
    for rank, grads in enumerate(found):
        for name, grad in grads.items():
            want = wanted.get(name)
            if want is None:
                assert grad is None, f"rank {rank}: {name} has a gradient"
                continue
            got = torch.zeros_like(want) if grad is None else grad
            gap = float((got - factor * want).abs().max())
            scale = factor * max(float(want.abs().max()), floor)
            assert gap <= tolerance * scale, f"rank {rank}: {name} is off by {gap / scale:.1e}"


@functools.cache
def dense(target: str, draft: str, dp: int) -> DenseResult:
    """The oracle's step with `clipped` on the standard batches."""
    dtype = next(models(target, draft)[0].parameters()).dtype
    return dense_step(*models(target, draft), batches(dp, dtype=dtype), clipped)


def check_step(target: str, draft: str, plan: Plan, *, tolerance: float = 1e-9) -> None:
    """One step on all ranks equals the oracle's: losses, metrics, gradients."""
    wanted = dense(target, draft, plan.dp)
    given = batches(plan.dp, dtype=next(models(target, draft)[0].parameters()).dtype)

    def body(model: ParallelModel, rank: int) -> Any:
        result = model.step(given[model.dp_rank], clipped)
        return result, gradients_of(model)

    outcomes = bound(target, draft, plan, body)
    for result, _ in outcomes:
        number = torch.tensor([result.policy_loss, result.draft_loss], dtype=torch.float64)
        expected = torch.tensor([wanted.policy_loss, wanted.draft_loss], dtype=torch.float64)
        torch.testing.assert_close(number, expected, rtol=tolerance, atol=tolerance)
        for name, value in wanted.metrics.items():
            assert abs(result.metrics[name] - value) <= tolerance * max(1.0, abs(value)), name
        assert result.metrics == outcomes[0][0].metrics
    assert_gradients([grads for _, grads in outcomes], joined(wanted), tolerance=tolerance)
