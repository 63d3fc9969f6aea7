"""The end of a call: raw sums of all ranks become the numbers that every rank returns."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from spec_compile.errors import ConfigError

from .balance import Balance
from .failure import FailureWord, SharedFailure
from .policy_loss import add_named
from .stage_run import Sums
from .world import World

ACCEPTANCE, SLOT_ACCEPTANCE = "acceptance", "slot_acceptance/"
ACCEPTANCE_COUNT, SLOT_COUNT = "acceptance_count", "slot_count/"
"""What acceptance is divided by, of all or of a slot: no convention of a loss changes it."""
RELATIVE_GAP, GAP_PER_TOKEN = 1e-4, 1e-6
"""How far the policy losses of cp peers may lie apart: sums on a GPU may add up in another order."""


@dataclass(frozen=True)
class StepResult:
    """What a step measured; the same on every rank."""

    policy_loss: float
    draft_loss: float
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluation:
    """What a draft achieves on a batch, without gradient."""

    draft_loss: float
    acceptance: list[float]
    """Predicted share of drafted tokens accepted at each step or slot: mean of sum_v min(p_v, q_v), of
    temperature 1; empty when the draft reports no stat of that name."""
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Totals:
    """Sums over all micro-batches and ranks."""

    policy: float
    named: dict[str, float]
    draft_loss: Tensor | None
    draft_count: Tensor | None
    stats: dict[str, Tensor]
    balance: Balance


def collect(
    world: World, sums: Sums, balance: Balance, *, is_last: bool, deadline_s: float
) -> Totals:
    """Exchange the sums of the last stage.

    Policy sums are the same on all cp ranks and count once; draft sums are partial on each.

    Raises:
        SharedFailure: on every rank, when the policy loss raised on one, or is another on cp peers.
    """
    policy, named = _policy_sums(sums)
    draft, stats = _draft_sums(sums)
    word = FailureWord.of(sums.error, world.rank) if sums.error is not None else None
    payload: dict[str, Any] = {
        "last": is_last,
        "dp": world.coordinates.dp,
        "cp": world.coordinates.cp,
        "policy": policy,
        "tokens": sums.tokens,
        "named": named,
        "draft": draft,
        "stats": stats,
        "balance": dataclasses.astuple(balance),
        "error": None if word is None else word.__dict__,
    }
    replies = world.control.all_gather(payload, deadline_s=deadline_s)
    if sums.error is not None:
        raise SharedFailure(sums.error)
    for reply in replies:
        if reply["error"] is not None:
            raise SharedFailure(FailureWord.from_json(reply["error"]).exception())
    _compare_cp_peers(replies)
    last = [r for r in replies if r["last"]]
    whole = [r for r in last if r["cp"] == 0]
    named = _joined(reply["named"] for reply in whole)
    return Totals(
        policy=sum(r["policy"] for r in whole),
        named=named,
        draft_loss=_sum([r["draft"][0] for r in last]),
        draft_count=_sum([r["draft"][1] for r in last]),
        stats={
            name: t
            for name in last[0]["stats"]
            if (t := _sum([r["stats"][name] for r in last])) is not None
        },
        balance=sum((Balance(*r["balance"]) for r in whole), Balance()),
    )


def _policy_sums(sums: Sums) -> tuple[float, dict[str, float]]:
    """Read the policy's sums; a loss that is not finite is the error of the step."""
    try:
        found = [outcome.read() for outcome in sums.policy]
    except ConfigError as error:
        sums.error = sums.error or error
        return 0.0, {}
    return sum(loss for loss, _ in found), _joined(named for _, named in found)


def _joined(several: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for named in several:
        for name, value in named.items():
            add_named(total, name, value)
    return total


def _draft_sums(sums: Sums) -> tuple[list[Any], dict[str, Any]]:
    """Read [loss, count], None each where no draft ran, and the stats."""
    found = [readback.numbers() for readback in sums.draft]
    loss, count, *stats = [_listed(_sum(x)) for x in zip(*found, strict=True)] or [None, None]
    return [loss, count], dict(zip(sums.stat_names, stats, strict=True)) if found else {}


def _listed(total: Tensor | None) -> Any:
    return None if total is None else total.tolist()


def _compare_cp_peers(replies: Sequence[Mapping[str, Any]]) -> None:
    """Refuse policy losses that differ on ranks that were given the same rows."""
    firsts: dict[int, tuple[int, float]] = {}
    for rank, reply in enumerate(replies):
        if not reply["last"]:
            continue
        other, value = firsts.setdefault(reply["dp"], (rank, reply["policy"]))
        room = GAP_PER_TOKEN * reply["tokens"]
        if not math.isclose(reply["policy"], value, rel_tol=RELATIVE_GAP, abs_tol=room):
            raise SharedFailure(
                ConfigError(
                    f"policy_loss summed to {value} on rank {other} and to {reply['policy']} on rank {rank}, which "
                    "were given the same rows (context parallel peers); it must be a function of its rows alone, "
                    "without the rank or random numbers in it"
                )
            )


def _sum(values: Sequence[Any]) -> Tensor | None:
    found = [torch.tensor(v, dtype=torch.float64) for v in values if v is not None]
    return torch.stack(found).sum(0) if found else None


def ratio(total: Tensor | None, count: Tensor | None) -> Tensor:
    """Total / count in fp64, 0 where the count is 0; an empty vector when there is nothing."""
    if total is None or count is None:
        return torch.zeros(0, dtype=torch.float64)
    safe = torch.where(count == 0, torch.ones_like(count), count)
    return torch.where(count == 0, torch.zeros_like(total), total / safe)


def draft_metrics(totals: Totals, count: Tensor | None) -> tuple[float, dict[str, float]]:
    """The draft loss and the library's own metrics about the draft."""
    if totals.draft_loss is None or count is None:
        return 0.0, {}
    loss = ratio(totals.draft_loss, count)
    metrics: dict[str, float] = {}
    _flatten(metrics, "step/draft_loss", loss)
    _flatten(metrics, "step/draft_count", count)
    for name, value in totals.stats.items():
        if name != ACCEPTANCE_COUNT and not name.startswith(SLOT_COUNT):
            _flatten(metrics, f"step/draft_{name}", _mean(totals.stats, name, value, count))
    return float(loss.sum()), metrics


def layout_metrics(balance: Balance) -> dict[str, float]:
    """How evenly the step was spread over cp ranks, and how much of it was padding."""
    return {"step/imbalance": balance.imbalance, "step/padding": balance.padding}


def acceptance(totals: Totals, count: Tensor | None) -> list[float]:
    """Predicted acceptance by step: by slot where the draft counts its slots, whose loss weighs them."""
    stats = totals.stats
    names = [name for name in stats if name.startswith(SLOT_ACCEPTANCE)]
    if not names and ACCEPTANCE in stats:
        names = [ACCEPTANCE]
    if count is None:
        return []
    means = [_mean(stats, name, stats[name], count).reshape(-1) for name in names]
    return [float(share) for mean in means for share in mean]


def _mean(stats: Mapping[str, Tensor], name: str, value: Tensor, count: Tensor) -> Tensor:
    """A stat over its own divisor, or over the loss's count where it has none."""
    divisor = None
    if name == ACCEPTANCE:
        divisor = stats.get(ACCEPTANCE_COUNT)
    elif name.startswith(SLOT_ACCEPTANCE):
        divisor = stats.get(name.replace(SLOT_ACCEPTANCE, SLOT_COUNT))
    if divisor is None:
        divisor = count if value.shape == count.shape else count.max()
    return ratio(value, divisor)


def _flatten(metrics: dict[str, float], name: str, value: Tensor) -> None:
    if value.ndim == 0:
        metrics[name] = float(value)
    for i, item in enumerate(value.tolist() if value.ndim else []):
        metrics[f"{name}/{i}"] = item


def policy_metrics(totals: Totals, denominator: float) -> tuple[float, dict[str, float]]:
    """The policy loss and the user's named metrics."""
    scale = 1.0 / denominator if denominator else 0.0
    named = {
        name: value if name.endswith(("/max", "/min")) else value * scale
        for name, value in totals.named.items()
    }
    return totals.policy * scale, named
