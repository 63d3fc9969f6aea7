"""Rollouts shared by the ranks: each generates for some prompts, all of one dp index get the same.

Small status words go over the control plane, so that an error in generation or in a reward function
is raised on every rank; tokens and log-probs go through the cp and pp fabrics.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..failure import FailureWord
from ..model import ParallelModel
from ..rollout.params import FinishReason, Rollout, SamplingParams

FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length")
HEADER = 4
"""Prompt index, number of tokens, finish reason, weight version."""


@dataclass(frozen=True)
class Scored:
    """One completion and its reward."""

    rollout: Rollout
    reward: float = 0.0


def generate(
    model: ParallelModel, engine: Any, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> list[Rollout]:
    """Generate on all ranks together; collective.

    Args:
        model: tells which ranks there are.
        engine: this rank's rollout engine.
        prompts: of the whole global batch, the same list on every rank.
        params: the same on every rank.

    Returns:
        Completions of ``prompts[dp_rank::dp_size]``, each n times, in order, the same on every rank of
        this dp index; ``prompt_index`` points into ``prompts``.

    Raises:
        SpecCompileError: or what the engine raised, on every rank.
    """
    own = share_of(model, len(prompts), params.n)
    return [
        one.rollout for one in collect(model, lambda: own_rollouts(engine, prompts, params, own))
    ]


def share_of(model: ParallelModel, num_prompts: int, group_size: int) -> list[int]:
    """Places in ``prompts x group_size`` of the completions that this rank generates.

    A dp index has every dp_size-th prompt; its ranks have equal, contiguous parts of the completions, so
    that few prompts, too, keep all of them busy.
    """
    place, plan = model._world.coordinates, model.plan
    prompts = range(place.dp, num_prompts, plan.dp)
    places = [prompt * group_size + sample for prompt in prompts for sample in range(group_size)]
    member, members = place.pp * plan.cp + place.cp, plan.cp * plan.pp
    start, end = (len(places) * i // members for i in (member, member + 1))
    return places[start:end]


def own_rollouts(
    engine: Any, prompts: Sequence[Sequence[int]], params: SamplingParams, own: Sequence[int]
) -> list[Scored]:
    """Generate the completions at the places ``own``."""
    return [Scored(rollout) for rollout in engine.generate(prompts, params, only=own)]


def collect(model: ParallelModel, work: Callable[[], list[Scored]]) -> list[Scored]:
    """Do this rank's work and gather what the ranks of this dp index found, ordered by prompt.

    Raises:
        Exception: of the first rank whose ``work`` failed, on every rank.
    """
    world = model._world
    error: BaseException | None = None
    own: list[Scored] = []
    try:
        own = work()
    except Exception as found:  # raised below, when the others know it
        error = found
    integers, floats = _encode(own)
    word = None if error is None else FailureWord.of(error, world.rank)
    status = {
        "error": None if word is None else dataclasses.asdict(word),
        "sizes": [len(integers), len(floats)],
    }
    replies = world.control.all_gather(status, deadline_s=model.plan.entry_timeout_s)
    if error is not None:
        raise error
    for reply in replies:
        if reply["error"] is not None:
            raise FailureWord.from_json(reply["error"]).exception()
    widths = [max(reply["sizes"][i] for reply in replies) for i in range(2)]
    parts = zip(_gather(model, integers, widths[0]), _gather(model, floats, widths[1]), strict=True)
    everyone = [one for ints, reals in parts for one in _decode(ints, reals)]
    return sorted(
        everyone, key=lambda one: one.rollout.prompt_index
    )  # stable: samples stay in order


def _gather(model: ParallelModel, own: Tensor, width: int) -> list[list[Any]]:
    """Vectors of all cp and pp ranks of this dp index, each padded with zeros to ``width``."""
    world = model._world
    padded = torch.zeros(width, dtype=own.dtype)
    padded[: len(own)] = own
    gathered = padded.to(world.device)
    for name in ("cp", "pp"):
        gathered = world.fabrics[name].all_gather(gathered)
    rows: list[list[Any]] = gathered.reshape(-1, width).tolist()
    return rows


def _encode(own: Sequence[Scored]) -> tuple[Tensor, Tensor]:
    """int64: the count, then header and ids of each; fp64: reward and log-probs of each."""
    integers, floats = [len(own)], []
    for one in own:
        rollout = one.rollout
        reason = FINISH_REASONS.index(rollout.finish_reason)
        integers += [rollout.prompt_index, len(rollout.tokens), reason, rollout.weight_version]
        integers += rollout.tokens
        floats += [one.reward, *rollout.logprobs]
    return torch.tensor(integers), torch.tensor(floats, dtype=torch.float64)


def _decode(integers: list[int], floats: list[float]) -> list[Scored]:
    found, at, real = [], 1, 0
    for _ in range(integers[0]):
        prompt, length, reason, version = integers[at : at + HEADER]
        rollout = Rollout(
            prompt_index=prompt,
            tokens=integers[at + HEADER : at + HEADER + length],
            logprobs=floats[real + 1 : real + 1 + length],
            finish_reason=FINISH_REASONS[reason],
            weight_version=version,
        )
        found.append(Scored(rollout, floats[real]))
        at, real = at + HEADER + length, real + 1 + length
    return found
