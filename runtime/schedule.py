"""Pipeline schedules as action lists: who runs which micro-batch of which stage in which order.

The orders are those of torch.distributed.pipelining. They are generated here, not read from its
classes: torch 2.13's single-stage schedules list micro-batches 1..M instead of 0..M-1 for the last
stage of 1F1B, refuse fewer micro-batches than stages, and all need process groups. The tests compare
with torch's own lists and executor.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, cast

from spec_compile.errors import ConfigError, InvariantError
from spec_compile.plan import ONE_STAGE

Kind = Literal["F", "B", "I", "W"]
_TEXT = re.compile(r"(\d+)([FBIW])(\d+)")
SEVERAL_STAGES = ("interleaved", "zero_bubble")


class Action(NamedTuple):
    """One computation of one stage on one micro-batch; prints as ``0F3``."""

    kind: Kind
    """``F`` forward, ``B`` backward; or apart: ``I`` backward to the stage's input, ``W`` to weights."""
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


Actions = Sequence[Action]
"""What one pp rank does, in order."""


def rank_of(stage: int, pp: int) -> int:
    """The pp rank of a stage: stages go round the ranks."""
    return stage % pp


def parse_actions(text: str) -> list[Action]:
    """Read actions separated by blanks or commas, the inverse of `format_actions`.

    Raises:
        ConfigError: A word is not an action.
    """
    actions = []
    for word in text.replace(",", " ").split():
        match = _TEXT.fullmatch(word)
        if match is None:
            raise ConfigError(
                f"expected an action like 0F3 (stage, F, B, I or W, micro-batch), found {word!r}"
            )
        stage, kind, micro_batch = match.groups()
        actions.append(Action(cast(Kind, kind), int(stage), int(micro_batch)))
    return actions


def format_actions(actions: Iterable[Action]) -> str:
    """Write actions as text, such as ``0F0 0F1 0B0 0B1``."""
    return " ".join(str(action) for action in actions)


def _gpipe(stage: int, num_stages: int, num_micro_batches: int) -> list[Action]:
    return [Action("F", stage, m) for m in range(num_micro_batches)] + [
        Action("B", stage, m) for m in range(num_micro_batches)
    ]


def _one_f_one_b(stage: int, num_stages: int, num_micro_batches: int) -> list[Action]:
    warmup = min(num_micro_batches, num_stages - stage)
    actions = [Action("F", stage, m) for m in range(warmup)]
    for m in range(num_micro_batches):
        actions.append(Action("B", stage, m))
        if m + warmup < num_micro_batches:
            actions.append(Action("F", stage, m + warmup))
    return actions


def _interleaved(rank: int, pp: int, chunks: int, number: int, *, split: bool) -> list[Action]:
    """Rounds of micro-batches go through a rank's stages, first to last, then back.

    ``split`` puts weight gradients where a rank would wait otherwise: ZB1P of arXiv:2401.10241.
    """
    width = number // _rounds(number, pp)
    total = chunks * number
    ahead = (chunks - 1) * width + (1 if split else 2) * (pp - 1 - rank)
    warmup = min(ahead, total)

    def at(kind: Kind, turn: int) -> Action:
        chunk = turn // width % chunks
        stage = (chunk if kind == "F" else chunks - 1 - chunk) * pp + rank
        return Action(kind, stage, turn // (width * chunks) * width + turn % width)

    actions = [at("F", turn) for turn in range(warmup)]
    for turn in range(total):
        if warmup + turn < total:
            actions.append(at("F", warmup + turn))
        actions.append(at("I" if split else "B", turn))
        if split and turn >= rank:
            actions.append(at("W", turn - rank))
    if split:
        actions += [at("W", turn) for turn in range(max(0, total - rank), total)]
    return actions


def _rounds(number: int, pp: int) -> int:
    return max(1, number // pp)


def build_schedule(
    name: str, pp: int, num_micro_batches: int, stages_per_rank: int = 1
) -> list[list[Action]]:
    """Build the action list of every pp rank.

    Args:
        name: ``gpipe``, ``1f1b``, ``interleaved`` or ``zero_bubble``.
        pp: Number of ranks.
        num_micro_batches: As many as `padded_micro_batches` says.
        stages_per_rank: More than 1 for the last two only.

    Raises:
        ConfigError: The name is unknown, or the numbers do not fit the schedule.
    """
    if name not in ONE_STAGE + SEVERAL_STAGES:
        known = ", ".join(ONE_STAGE + SEVERAL_STAGES)
        raise ConfigError(f"expected a schedule out of {known}, found {name!r}")
    if pp < 1 or num_micro_batches != padded_micro_batches(name, num_micro_batches, pp):
        raise ConfigError(
            f"{name} cannot run {num_micro_batches} micro-batches on {pp} ranks; add empty ones up to "
            "padded_micro_batches(name, m, pp)"
        )
    if stages_per_rank < 1 or (name in ONE_STAGE and stages_per_rank > 1):
        raise ConfigError(f"{name} runs one stage a rank, found {stages_per_rank}")
    if name in SEVERAL_STAGES:
        split = name == "zero_bubble"
        sizes = (pp, stages_per_rank, num_micro_batches)
        return [_interleaved(rank, *sizes, split=split) for rank in range(pp)]
    generate = _gpipe if name == "gpipe" else _one_f_one_b
    return [generate(stage, pp, num_micro_batches) for stage in range(pp)]


def padded_micro_batches(name: str, num_micro_batches: int, pp: int) -> int:
    """Return the number of micro-batches with the empty ones that the schedule needs.

    One stage a rank: as many as ranks. Several: a multiple of the number of rounds.
    """
    number = max(num_micro_batches, 1)
    if name in ONE_STAGE:
        return max(number, pp)
    while number % _rounds(number, pp):
        number += 1
    return number


def validate_schedule(
    orders: Sequence[Actions], num_micro_batches: int, stages_per_rank: int = 1
) -> None:
    """Check that every action occurs once, on its own rank, in an order that cannot deadlock.

    Args:
        orders: The actions of each pp rank.
        num_micro_batches: Micro-batches that every stage must run forward and backward.
        stages_per_rank: Stages of each rank.

    Raises:
        InvariantError: The lists are incomplete, or their ranks wait for each other for ever.
    """
    kinds: tuple[Kind, ...] = ("F", "B")
    if any(action.kind == "I" for actions in orders for action in actions):
        kinds = ("F", "I", "W")
    for rank, actions in enumerate(orders):
        stages = [chunk * len(orders) + rank for chunk in range(stages_per_rank)]
        expected = {
            Action(k, s, m) for k in kinds for s in stages for m in range(num_micro_batches)
        }
        if set(actions) != expected or len(actions) != len(expected):
            raise InvariantError(
                f"pp rank {rank}: expected {' and '.join(kinds)} of stage {', '.join(map(str, stages))} once for "
                f"each of {num_micro_batches} micro-batches, found {format_actions(actions)}"
            )
        for stage in stages:
            _check_one_lane(rank, [action for action in actions if action.stage == stage])
    _happens_before(orders)


def _check_one_lane(rank: int, actions: Actions) -> None:
    # Taps take their slots in this order, so both ends of a channel must agree on it.
    for kind in ("F", "B", "I", "W"):
        order = [action.micro_batch for action in actions if action.kind == kind]
        if order != sorted(order):
            raise InvariantError(f"pp rank {rank}: expected ascending {kind}s, found {order}")


def needs(action: Action, num_stages: int) -> list[Action]:
    """List what must be complete before ``action``, apart from its own rank's earlier actions."""
    kind, stage, m = action
    if kind == "F":
        return [Action("F", stage - 1, m)] if stage > 0 else []
    if kind == "W":
        return [Action("I", stage, m)]
    later = [Action(kind, stage + 1, m)] if stage + 1 < num_stages else []
    return [Action("F", stage, m), *later]


def _happens_before(orders: Sequence[Actions]) -> dict[Action, tuple[int, ...]]:
    """Run the lists; give each action how many actions of each rank are complete before it starts.

    Raises:
        InvariantError: The ranks wait for each other for ever.
    """
    num_stages = 1 + max((a.stage for actions in orders for a in actions), default=0)
    place = {a: (rank, i) for rank, actions in enumerate(orders) for i, a in enumerate(actions)}
    done: dict[Action, tuple[int, ...]] = {}
    clocks = [(0,) * len(orders) for _ in orders]
    position = [0] * len(orders)
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(orders):
            while position[rank] < len(actions):
                action = actions[position[rank]]
                inputs = needs(action, num_stages)
                if any(x not in done for x in inputs):
                    break
                before = [clocks[rank]]
                for x in inputs:
                    other, i = place[x]
                    before.append((*done[x][:other], i + 1, *done[x][other + 1 :]))
                start = tuple(max(column) for column in zip(*before, strict=True))
                done[action] = start
                position[rank] += 1
                clocks[rank] = (*start[:rank], position[rank], *start[rank + 1 :])
                moved = True
    stuck = [str(o[p]) for o, p in zip(orders, position, strict=True) if p < len(o)]
    if stuck:
        raise InvariantError(f"the schedule deadlocks: {', '.join(stuck)} wait for each other")
    return done


def tap_depths(orders: Sequence[Actions], source_stages: Iterable[int]) -> dict[int, int]:
    """Count for each source the slots with which it never waits for credit, however slow the draft.

    A slot is written by the source's forward and read by the last stage from its forward to the end
    of its backward (to its input) of the same micro-batch. The k-th push takes slot ``k % depth``, so
    ``depth`` is the least d for which the backward of push k - d is complete, by the lists alone,
    before the forward of push k may start. ``p - s`` for 1F1B, the number of micro-batches for GPipe.

    A forward-only pass runs the forwards of the same lists and gives slots back in the last stage's
    forward. A push may wait there, but only for what precedes it in these lists: no deadlock.

    Args:
        orders: The actions of each pp rank.
        source_stages: Stages that push; not the last.
    """
    last = max(action.stage for actions in orders for action in actions)
    done = _happens_before(orders)
    consumer = rank_of(last, len(orders))
    freed_at = {
        action.micro_batch: place + 1
        for place, action in enumerate(orders[consumer])
        if action.stage == last and action.kind in ("B", "I")
    }
    depths: dict[int, int] = {}
    for source in source_stages:
        if not 0 <= source < last:
            raise InvariantError(f"expected a source stage before stage {last}, found {source}")
        mine = orders[rank_of(source, len(orders))]
        pushes = [action for action in mine if action.kind == "F" and action.stage == source]
        depths[source] = next(
            (
                depth
                for depth in range(1, len(pushes))
                if all(
                    freed_at[old.micro_batch] <= done[new][consumer]
                    for old, new in zip(pushes, pushes[depth:], strict=False)
                )
            ),
            max(1, len(pushes)),
        )
    return depths
