"""Rollouts shared by the ranks: each generates for some prompts, all of one dp index get the same.

Small status words go over the control plane, so that an error in generation or in a reward function
is raised on every rank; tokens and log-probs go through the cp and pp fabrics.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spec_compile.errors import BatchError, ConfigError

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
        BatchError: on every rank, when prompts differ or there are none.
        SpecCompileError: or what the engine raised, on every rank.
    """
    found = collect(model, engine, prompts, params, lambda rollouts: [0.0] * len(rollouts))
    return [one.rollout for one in found]


def check_kinds(model: Any, engine: Any) -> None:
    """Refuse other things in their places, for instance each other.

    Raises:
        ConfigError: says which one, what it should be, and what it is.
    """
    if not isinstance(model, ParallelModel):
        raise ConfigError(
            f"model must be what parallelize gives, found {type(model).__name__}; the model comes first, then the "
            "engine"
        )
    if not all(callable(getattr(engine, name, None)) for name in ("generate", "update_weights")):
        raise ConfigError(
            f"engine must be a rollout engine such as Engine(target, draft), found {type(engine).__name__}"
        )


def update_engine(model: ParallelModel, engine: Any, version: int) -> None:
    """Give this rank's engine the live weights of policy and draft; collective.

    Raises:
        ConfigError: ``model`` or ``engine`` is none.
        SpecCompileError: or what an engine raised, on every rank; the next update can work.
    """
    check_kinds(model, engine)
    which = ["policy"]
    if model.draft is not None and engine.serves_draft:
        which.append("draft")
    for name in which:
        named, error = model.export_weights(name), None
        try:
            engine.update_weights(name, named, version)
        except Exception as found:  # raised below, when the others know it
            error = found
            deque(named, maxlen=0)  # the export is collective: every rank takes it to its end
        share(model, f"update of the engine's {name}", {}, error)


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


def collect(
    model: ParallelModel,
    engine: Any,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    score: Callable[[list[Rollout]], list[float]],
) -> list[Scored]:
    """Generate and score this rank's share, and gather what the ranks of this dp index found.

    Raises:
        Exception: of the first rank whose engine or ``score`` failed, on every rank.
    """
    check_kinds(model, engine)
    error: BaseException | None = None
    own: list[Scored] = []
    try:
        rollouts = engine.generate(prompts, params, only=share_of(model, len(prompts), params.n))
        own = [Scored(*pair) for pair in zip(rollouts, score(rollouts), strict=True)]
    except Exception as found:  # raised below, when the others know it
        error = found
    integers, floats = _encode(own)
    payload = {
        "prompts": hashlib.blake2b(repr((prompts, params)).encode(), digest_size=8).hexdigest(),
        "sizes": [len(integers), len(floats)],
        "engine": engine.state_dict(),
    }
    replies = share(model, "generate", payload, error, before_raising=lambda r: _realign(engine, r))
    if len({reply["prompts"] for reply in replies}) > 1:
        raise BatchError(
            "ranks must be given the same prompts and sampling parameters; theirs differ"
        )
    if not prompts:
        raise BatchError("generate needs at least one prompt, found none")
    widths = [max(reply["sizes"][i] for reply in replies) for i in range(2)]
    parts = zip(_gather(model, integers, widths[0]), _gather(model, floats, widths[1]), strict=True)
    everyone = [one for ints, reals in parts for one in _decode(ints, reals)]
    return sorted(everyone, key=lambda one: one.rollout.prompt_index)  # stable: samples in order


def share(
    model: ParallelModel,
    call: str,
    payload: dict[str, Any],
    error: BaseException | None = None,
    *,
    before_raising: Callable[[list[dict[str, Any]]], None] | None = None,
) -> list[dict[str, Any]]:
    """Give every rank the small payloads of all, in rank order.

    Raises:
        Exception: ``error``, or the first one that a rank handed in: every rank raises.
    """
    word = None if error is None else FailureWord.of(error, model._world.rank)
    said = {**payload, "failure": None if word is None else dataclasses.asdict(word)}
    with model._call(grad=None):
        replies = model._entry.exchange(call, lambda: said, ConfigError)
    if before_raising is not None:
        before_raising(replies)
    if error is not None:
        raise error
    for reply in replies:
        if reply["failure"] is not None:
            raise FailureWord.from_json(reply["failure"]).exception()
    return replies


def _realign(engine: Any, replies: list[dict[str, Any]]) -> None:
    """Let all engines have counted the same calls, also when one failed before it counted."""
    states = [reply["engine"] for reply in replies]
    if any(state != states[0] for state in states):
        engine.load_state_dict(max(states, key=lambda state: int(state["calls"])))


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
