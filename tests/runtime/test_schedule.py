"""Schedules: equal to torch's executor, complete, free of deadlock; the depth of tap rings."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from spec_compile.errors import ConfigError, InvariantError
from spec_compile.runtime.schedule import (
    Action,
    build_schedule,
    format_actions,
    needs,
    padded_micro_batches,
    parse_actions,
    tap_depths,
    validate_schedule,
)

NAMES = ["gpipe", "1f1b"]
TORCH = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
SEVERAL = {
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
}
SIZES = [(p, m) for p in (1, 2, 3, 4) for m in range(p, 9)]


class RecordingStage:
    """Answers torch's executor like a pipeline stage and writes down what it computes."""

    def __init__(self, stage_index: int, num_stages: int) -> None:
        self.stage_index, self.num_stages = stage_index, num_stages
        self.is_first, self.is_last = stage_index == 0, stage_index == num_stages - 1
        self.calls: list[Action] = []

    def forward_one_chunk(self, micro_batch: int, *args: Any, **kwargs: Any) -> None:
        self.calls.append(Action("F", self.stage_index, micro_batch))

    def backward_one_chunk(self, micro_batch: int, *args: Any, **kwargs: Any) -> None:
        self.calls.append(Action("B", self.stage_index, micro_batch))

    def no_ops(self, *args: Any) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = no_ops
    perform_reduce_grad = no_ops


@pytest.mark.parametrize("name", NAMES)
def test_order_equals_torchs_own_executor(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cls = TORCH[name]
    for method in ("_initialize_stage", "_maybe_compute_loss", "_maybe_get_loss", "_update_losses"):
        monkeypatch.setattr(cls, method, lambda self, *args, **kwargs: None)
    for num_stages, num_micro_batches in SIZES:
        orders = build_schedule(name, num_stages, num_micro_batches)
        for rank in range(num_stages):
            stage = RecordingStage(rank, num_stages)
            schedule = cls(stage, num_micro_batches)  # type: ignore[arg-type]
            schedule._step_microbatches([()] * num_micro_batches, [{}] * num_micro_batches)
            assert orders[rank] == stage.calls


@pytest.mark.parametrize("name", NAMES)
def test_order_equals_torchs_published_lists_before_the_last_stage(name: str) -> None:
    for num_stages, num_micro_batches in SIZES:
        orders = build_schedule(name, num_stages, num_micro_batches)
        stage = RecordingStage(0, num_stages)
        published = TORCH[name](stage, num_micro_batches).pipeline_order  # type: ignore[arg-type]
        assert published is not None
        for rank in range(num_stages - 1):
            theirs = [str(a) for a in published[rank] if a is not None]
            assert format_actions(orders[rank]) == " ".join(
                word for word in theirs if "REDUCE_GRAD" not in word
            )


class NumberedStage:
    """What torch's schedules of several stages a rank read of a stage."""

    has_backward = True
    submod = None

    def __init__(self, rank: int, pp: int, stages_per_rank: int, chunk: int) -> None:
        self.group_rank, self.group_size = rank, pp
        self.stage_index, self.num_stages = chunk * pp + rank, pp * stages_per_rank
        self.is_first = self.stage_index == 0
        self.is_last = self.stage_index == self.num_stages - 1


@pytest.mark.parametrize("name", SEVERAL)
@pytest.mark.parametrize("pp", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("stages_per_rank", [1, 2, 3])
def test_order_of_several_stages_equals_torchs_lists(
    name: str, pp: int, stages_per_rank: int
) -> None:
    for num_micro_batches in range(1, 13):
        if padded_micro_batches(name, num_micro_batches, pp) != num_micro_batches:
            with pytest.raises(ConfigError, match="add empty ones"):
                build_schedule(name, pp, num_micro_batches, stages_per_rank)
            continue
        orders = build_schedule(name, pp, num_micro_batches, stages_per_rank)
        stages: Any = [NumberedStage(0, pp, stages_per_rank, c) for c in range(stages_per_rank)]
        published = SEVERAL[name](stages, num_micro_batches).pipeline_order
        for rank in range(pp):
            theirs = [str(a) for a in published[rank] if a is not None]
            assert format_actions(orders[rank]) == " ".join(theirs)
        validate_schedule(orders, num_micro_batches, stages_per_rank)


@pytest.mark.parametrize("name", NAMES)
def test_built_schedules_are_valid(name: str) -> None:
    for num_stages, num_micro_batches in SIZES:
        validate_schedule(build_schedule(name, num_stages, num_micro_batches), num_micro_batches)


def test_1f1b_alternates_after_the_warmup() -> None:
    assert [format_actions(o) for o in build_schedule("1f1b", 2, 3)] == [
        "0F0 0F1 0B0 0F2 0B1 0B2",
        "1F0 1B0 1F1 1B1 1F2 1B2",
    ]


def test_too_few_micro_batches_are_padded_with_empty_ones() -> None:
    assert padded_micro_batches("1f1b", 1, 4) == 4
    assert padded_micro_batches("gpipe", 7, 4) == 7
    assert [padded_micro_batches("interleaved", m, 4) for m in (0, 3, 8, 9, 11)] == [
        1,
        3,
        8,
        10,
        12,
    ]
    with pytest.raises(ConfigError, match="1f1b cannot run 2 micro-batches on 3 ranks"):
        build_schedule("1f1b", 3, 2)


def test_several_stages_need_a_schedule_for_them() -> None:
    with pytest.raises(ConfigError, match="gpipe runs one stage a rank, found 2"):
        build_schedule("gpipe", 2, 2, 2)


def test_unknown_schedule_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="out of gpipe, 1f1b, interleaved, zero_bubble, found 'pipedream'"
    ):
        build_schedule("pipedream", 2, 2)


@given(
    st.lists(st.builds(Action, st.sampled_from("FBIW"), st.integers(0, 99), st.integers(0, 999)))
)
def test_text_round_trips(actions: list[Action]) -> None:
    assert parse_actions(format_actions(actions)) == actions


def test_malformed_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="found '0X1'"):
        parse_actions("0F0, 0X1")


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["0F0 0B0 0F1"], "once for each of 2"),
        (["0F0 0F1 0B0 0B1 0B1"], "once for each of 2"),
        (["0B0 0F0 0F1 0B1"], "deadlocks: 0B0"),
        (["0F1 0F0 0B0 0B1"], "ascending Fs"),
        (["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"], "deadlocks: 0B0, 1F1"),
        (["1F0 1F1 1B0 1B1"], "F and B of stage 0"),
    ],
)
def test_invalid_schedules_are_refused(texts: list[str], message: str) -> None:
    with pytest.raises(InvariantError, match=message):
        validate_schedule([parse_actions(text) for text in texts], 2)


def reachable_states(orders: list[list[Action]]) -> set[tuple[int, ...]]:
    """Every tuple of numbers of finished actions that some speed of the ranks leads to."""
    index = [{action: i for i, action in enumerate(order)} for order in orders]
    last = len(orders) - 1

    def ready(state: tuple[int, ...], rank: int) -> bool:
        kind, stage, m = orders[rank][state[rank]]
        if kind == "F":
            return stage == 0 or index[stage - 1][Action("F", stage - 1, m)] < state[stage - 1]
        return stage == last or index[stage + 1][Action("B", stage + 1, m)] < state[stage + 1]

    start = (0,) * len(orders)
    seen, todo = {start}, [start]
    while todo:
        state = todo.pop()
        for rank in range(len(orders)):
            if state[rank] < len(orders[rank]) and ready(state, rank):
                follower = (*state[:rank], state[rank] + 1, *state[rank + 1 :])
                if follower not in seen:
                    seen.add(follower)
                    todo.append(follower)
    return seen


def most_slots_in_use(orders: list[list[Action]], states: set[tuple[int, ...]], source: int) -> int:
    """Slots written or being written and not yet given back, at worst."""

    def count(order: list[Action], kind: str) -> list[int]:
        totals = [0]
        for action in order:
            totals.append(totals[-1] + (action.kind == kind))
        return totals

    pushed, freed = count(orders[source], "F"), count(orders[-1], "B")
    # pushing starts as soon as the forward may start, so a started F counts like a finished one
    return max(pushed[state[source]] - freed[state[-1]] for state in states)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_tap_depth_is_the_most_slots_in_use_over_all_executions(name: str, num_stages: int) -> None:
    for num_micro_batches in range(1, 9):
        padded = padded_micro_batches(name, num_micro_batches, num_stages)
        orders = build_schedule(name, num_stages, padded)
        states = reachable_states(orders)
        for source in range(num_stages - 1):
            assert tap_depths(orders, [source])[source] == most_slots_in_use(orders, states, source)


def dependencies(orders: list[list[Action]]) -> dict[Action, list[Action]]:
    """What each action waits for: the one before it on its rank, activations, gradients."""
    last = max(action.stage for order in orders for action in order)
    found: dict[Action, list[Action]] = {}
    for order in orders:
        for before, action in zip([None, *order], order, strict=False):
            waits = [before] if before is not None else []
            kind, stage, m = action
            if kind == "F" and stage > 0:
                waits.append(Action("F", stage - 1, m))
            if kind in "BI" and stage < last:
                waits.append(Action(kind, stage + 1, m))
            found[action] = waits
    return found


def ancestors(waits: dict[Action, list[Action]]) -> dict[Action, set[Action]] | None:
    """Everything that must have happened before each action; None when some wait for each other."""
    bits = {action: 1 << i for i, action in enumerate(waits)}
    masks: dict[Action, int] = {}
    todo = list(waits)
    while todo:
        rest = []
        for action in todo:
            if all(w in masks for w in waits[action]):
                mask = 0
                for w in waits[action]:
                    mask |= masks[w] | bits[w]
                masks[action] = mask
            else:
                rest.append(action)
        if len(rest) == len(todo):
            return None
        todo = rest
    last = max(action.stage for action in waits)
    frees = [a for a in waits if a.stage == last and a.kind in "BI"]
    return {a: {f for f in frees if masks[a] & bits[f]} for a in waits if a.kind == "F"}


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zero_bubble"])
@pytest.mark.parametrize("pp", [2, 3, 4, 5, 6, 7, 8])
def test_tap_depth_is_exact_for_every_schedule(name: str, pp: int) -> None:
    """Over 1 to 4 stages a rank and 1 to 16 micro-batches.

    Just before a push, an execution that does nothing but what the push waits for has the fewest
    slots back: what it has pushed and not got back is the most that is ever in use. And a pass of
    forwards alone, whose pushes wait for slots, never deadlocks at that depth.
    """
    for stages_per_rank in range(1, 5 if name in SEVERAL else 2):
        for num_micro_batches in range(1, 17):
            if padded_micro_batches(name, num_micro_batches, pp) != num_micro_batches:
                continue
            orders = build_schedule(name, pp, num_micro_batches, stages_per_rank)
            last = pp * stages_per_rank - 1
            depths = tap_depths(orders, range(last))
            back = ancestors(dependencies(orders))
            assert back is not None
            for source in range(last):
                pushes = [a for a in orders[source % pp] if a.kind == "F" and a.stage == source]
                in_use = [k + 1 - len(back[push]) for k, push in enumerate(pushes)]
                assert depths[source] == max(in_use), (orders, source)
            forwards = [[a for a in order if a.kind == "F"] for order in orders]
            waits = dependencies(forwards)
            for source, depth in depths.items():
                for m in range(depth, num_micro_batches):
                    waits[Action("F", source, m)].append(Action("F", last, m - depth))
            assert ancestors(waits) is not None, (orders, depths)


def waits_for_slots(orders: list[list[Action]], depths: dict[int, int]) -> set[int]:
    """Sources that some execution of the lists, at any speeds, makes wait for a slot.

    Goes through every reachable state of a model in which an action starts when its inputs are there
    and a push takes a slot that the last stage's backward gives back.
    """
    last, number = max(a.stage for order in orders for a in order), len(orders)
    start = (0,) * number
    seen, todo, blocked = {start}, [start], set()
    while todo:
        state = todo.pop()
        done = {a for order, n in zip(orders, state, strict=True) for a in order[:n]}
        freed = sum(a.stage == last and a.kind in "BI" for a in done)
        for rank in range(number):
            if state[rank] == len(orders[rank]):
                continue
            action = orders[rank][state[rank]]
            if any(x not in done for x in needs(action, last + 1)):
                continue
            if action.kind == "F" and action.stage in depths:
                pushed = sum(a.kind == "F" and a.stage == action.stage for a in done)
                if pushed - freed >= depths[action.stage]:
                    blocked.add(action.stage)
                    continue
            follower = (*state[:rank], state[rank] + 1, *state[rank + 1 :])
            if follower not in seen:
                seen.add(follower)
                todo.append(follower)
    return blocked


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zero_bubble"])
@pytest.mark.parametrize(("pp", "stages_per_rank", "number"), [(2, 2, 4), (3, 1, 5), (2, 1, 7)])
def test_no_execution_waits_at_the_depth_and_one_does_at_a_slot_less(
    name: str, pp: int, stages_per_rank: int, number: int
) -> None:
    if stages_per_rank > 1 and name not in SEVERAL:
        stages_per_rank = 1
    number = padded_micro_batches(name, number, pp)
    orders = build_schedule(name, pp, number, stages_per_rank)
    depths = tap_depths(orders, range(pp * stages_per_rank - 1))
    assert waits_for_slots(orders, depths) == set()
    for source, depth in depths.items():
        if depth > 1:
            assert waits_for_slots(orders, {**depths, source: depth - 1}) == {source}


def test_tap_depth_has_the_closed_forms() -> None:
    """Of stage s on p ranks: p - s; all; max(p, 2 (p - s) - 1) in first chunks, else at most p."""
    assert tap_depths(build_schedule("1f1b", 4, 9), range(3)) == {0: 4, 1: 3, 2: 2}
    assert tap_depths(build_schedule("gpipe", 4, 9), range(3)) == {0: 9, 1: 9, 2: 9}
    for p in (2, 4, 8):
        depths = tap_depths(build_schedule("interleaved", p, 4 * p, 2), range(2 * p - 1))
        assert [depths[s] for s in range(p)] == [max(p, 2 * (p - s) - 1) for s in range(p)]
        assert all(depths[s] <= p for s in range(p, 2 * p - 1))


def test_taps_of_the_last_stage_need_no_channel() -> None:
    with pytest.raises(InvariantError, match="before stage 1, found 1"):
        tap_depths(build_schedule("1f1b", 2, 2), [1])
