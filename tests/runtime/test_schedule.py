"""Schedules: equal to torch's executor, complete, free of deadlock; the depth of tap rings."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

from spec_compile.errors import ConfigError, InvariantError
from spec_compile.runtime.schedule import (
    Action,
    build_schedule,
    format_actions,
    padded_micro_batches,
    parse_actions,
    tap_depth,
    validate_schedule,
)

NAMES = ["gpipe", "1f1b"]
TORCH = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
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
    assert padded_micro_batches(1, 4) == 4
    assert padded_micro_batches(7, 4) == 7
    with pytest.raises(ConfigError, match="3 stages and 2 micro-batches"):
        build_schedule("1f1b", 3, 2)


def test_unknown_schedule_is_refused() -> None:
    with pytest.raises(ConfigError, match="out of gpipe, 1f1b, found 'pipedream'"):
        build_schedule("pipedream", 2, 2)


@given(st.lists(st.builds(Action, st.sampled_from("FB"), st.integers(0, 99), st.integers(0, 999))))
def test_text_round_trips(actions: list[Action]) -> None:
    assert parse_actions(format_actions(actions)) == actions


def test_malformed_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="found '0W1'"):
        parse_actions("0F0, 0W1")


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
        padded = padded_micro_batches(num_micro_batches, num_stages)
        orders = build_schedule(name, num_stages, padded)
        states = reachable_states(orders)
        for source in range(num_stages - 1):
            assert tap_depth(orders, source) == most_slots_in_use(orders, states, source)


def test_tap_depth_has_the_closed_forms() -> None:
    assert [tap_depth(build_schedule("1f1b", 4, 9), s) for s in range(3)] == [4, 3, 2]
    assert [tap_depth(build_schedule("gpipe", 4, 9), s) for s in range(3)] == [9, 9, 9]


def test_taps_of_the_last_stage_need_no_channel() -> None:
    with pytest.raises(InvariantError, match="before stage 1, found 1"):
        tap_depth(build_schedule("1f1b", 2, 2), 1)
