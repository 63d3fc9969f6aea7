"""Pipeline schedules as action lists: who runs which micro-batch in which order.

The orders are those that torch.distributed.pipelining's executor follows. They are generated here,
not read from its classes: torch 2.13's single-stage schedules list micro-batches 1..M instead of
0..M-1 for the last stage of 1F1B and refuse fewer micro-batches than stages. The tests compare with
torch's own executor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple, cast

from spec_compile.errors import ConfigError, InvariantError

Kind = Literal["F", "B"]
_TEXT = re.compile(r"(\d+)([FB])(\d+)")


class Action(NamedTuple):
    """One computation of one stage on one micro-batch; prints as ``0F3``."""

    kind: Kind
    """``F`` forward, ``B`` backward."""
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


Actions = Sequence[Action]
"""What one pp rank does, in order."""


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
                f"expected an action like 0F3 (stage, F or B, micro-batch), found {word!r}"
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


_GENERATORS: dict[str, Callable[[int, int, int], list[Action]]] = {
    "gpipe": _gpipe,
    "1f1b": _one_f_one_b,
}


def build_schedule(name: str, num_stages: int, num_micro_batches: int) -> list[list[Action]]:
    """Build the action list of every pp rank, one stage a rank.

    Args:
        name: ``gpipe`` or ``1f1b``.
        num_stages: Number of stages.
        num_micro_batches: At least ``num_stages``; see `padded_micro_batches`.

    Raises:
        ConfigError: The name is unknown, or there are too few micro-batches.
    """
    if name not in _GENERATORS:
        known = ", ".join(_GENERATORS)
        raise ConfigError(f"expected a schedule out of {known}, found {name!r}")
    if num_stages < 1 or num_micro_batches < num_stages:
        raise ConfigError(
            f"expected 1 stage or more and as many micro-batches, found {num_stages} stages and "
            f"{num_micro_batches} micro-batches; add empty ones up to padded_micro_batches(m, pp)"
        )
    return [_GENERATORS[name](stage, num_stages, num_micro_batches) for stage in range(num_stages)]


def padded_micro_batches(num_micro_batches: int, num_stages: int) -> int:
    """Return the number of micro-batches with the empty ones that fill the pipeline."""
    return max(num_micro_batches, num_stages, 1)


def validate_schedule(orders: Sequence[Actions], num_micro_batches: int) -> None:
    """Check that every action occurs once, on its own rank, in an order that cannot deadlock.

    Args:
        orders: The actions of each pp rank, one stage a rank.
        num_micro_batches: Micro-batches that every stage must run forward and backward.

    Raises:
        InvariantError: The lists are incomplete, or their ranks wait for each other for ever.
    """
    for stage, actions in enumerate(orders):
        expected = {Action(k, stage, m) for k in ("F", "B") for m in range(num_micro_batches)}
        found = set(actions)
        if found != expected or len(actions) != len(expected):
            raise InvariantError(
                f"pp rank {stage}: expected F and B of stage {stage} once for each of "
                f"{num_micro_batches} micro-batches, found {format_actions(actions)}"
            )
        _check_one_lane(stage, actions)
    _happens_before(orders)


def _check_one_lane(stage: int, actions: Actions) -> None:
    # Peers that ignore tags match messages by order, so neighbours must agree on it.
    for kind in ("F", "B"):
        order = [action.micro_batch for action in actions if action.kind == kind]
        if order != sorted(order):
            raise InvariantError(f"pp rank {stage}: expected ascending {kind}s, found {order}")


def needs(action: Action, num_stages: int) -> list[Action]:
    """List what must be complete before ``action``, apart from its own rank's earlier actions."""
    kind, stage, m = action
    if kind == "F":
        return [Action("F", stage - 1, m)] if stage > 0 else []
    later = [Action("B", stage + 1, m)] if stage + 1 < num_stages else []
    return [Action("F", stage, m), *later]


def _happens_before(orders: Sequence[Actions]) -> dict[Action, tuple[int, ...]]:
    """Run the lists; give each action how many actions of each rank are complete before it starts.

    Raises:
        InvariantError: The ranks wait for each other for ever.
    """
    num_stages = len(orders)
    done: dict[Action, tuple[int, ...]] = {}
    clocks = [(0,) * num_stages for _ in orders]
    position = [0] * num_stages
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
                    clock = done[x]
                    own = orders[x.stage].index(x) + 1
                    before.append((*clock[: x.stage], own, *clock[x.stage + 1 :]))
                done[action] = tuple(max(column) for column in zip(*before, strict=True))
                position[rank] += 1
                start = done[action]
                clocks[rank] = (*start[:rank], position[rank], *start[rank + 1 :])
                moved = True
    stuck = [str(o[p]) for o, p in zip(orders, position, strict=True) if p < len(o)]
    if stuck:
        raise InvariantError(f"the schedule deadlocks: {', '.join(stuck)} wait for each other")
    return done


def tap_depth(orders: Sequence[Actions], source_stage: int) -> int:
    """Count the slots with which ``source_stage`` never waits for credit, however slow the draft.

    A slot is written by the source's forward and read by the last stage from its forward to the end
    of its backward of the same micro-batch. The k-th push takes slot ``k % depth``, so ``depth`` is
    the least d for which the backward of push k - d is complete, by the lists alone, before the
    forward of push k may start. ``p - s`` for 1F1B, the number of micro-batches for GPipe.

    Args:
        orders: The actions of each pp rank, one stage a rank.
        source_stage: Stage that pushes; not the last.
    """
    last = len(orders) - 1
    if not 0 <= source_stage < last:
        raise InvariantError(f"expected a source stage before stage {last}, found {source_stage}")
    done = _happens_before(orders)
    pushes = [action for action in orders[source_stage] if action.kind == "F"]
    freed_at = {
        action.micro_batch: place + 1
        for place, action in enumerate(orders[last])
        if action.kind == "B"
    }
    for depth in range(1, len(pushes)):
        pairs = zip(pushes, pushes[depth:], strict=False)
        if all(freed_at[old.micro_batch] <= done[new][last] for old, new in pairs):
            return depth
    return max(1, len(pushes))
