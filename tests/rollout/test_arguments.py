from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import spec_compile as sc
from tests.rollout.cases import PROMPTS, BigramDraft, eagle, greedy, near_bigram

PARAMS = sc.SamplingParams(n=3, seed=5, temperature=1.3, max_tokens=6, stop_token_ids=())
TOTAL = 3 * len(PROMPTS)


@pytest.fixture(scope="module")
def target() -> Any:
    return near_bigram()


@pytest.fixture(scope="module")
def engine(target: Any) -> sc.Engine:
    return sc.Engine(target, BigramDraft(target), max_num_seqs=5, num_speculative_tokens=2)


def drawn(rollouts: list[sc.Rollout]) -> list[list[int]]:
    return [one.tokens for one in rollouts]


@pytest.mark.parametrize(
    "only",
    [[2, 2, 5], [5, 2], [TOTAL], [-1], [1.0], [True], [None], 3, "12", {1: 0}, {1, 2},
     torch.tensor(3), torch.tensor([[1], [2]]), (place for place in (1, 2))],
)  # fmt: skip
def test_places_that_are_not_ascending_distinct_places_are_refused(
    engine: sc.Engine, only: Any
) -> None:
    engine.generate([[1]])
    before = engine.state_dict()
    with pytest.raises(
        sc.ConfigError,
        match=rf"distinct places in prompts x n, ascending, from 0 to {TOTAL - 1}",
    ):
        engine.generate(PROMPTS, sc.SamplingParams(n=3), only=only)
    assert engine.state_dict() == before, "a refused call does not count"


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_places_of_any_ordered_kind_give_what_the_whole_call_gives_there(
    engine: sc.Engine, kind: Any
) -> None:
    whole = drawn(engine.generate(PROMPTS, PARAMS))
    for places in ([2, 5, TOTAL - 1], [0]):
        found = drawn(engine.generate(PROMPTS, PARAMS, only=kind(places)))
        assert found == [whole[place] for place in places]
    assert engine.generate(PROMPTS, PARAMS, only=range(0)) == []


@pytest.mark.parametrize(
    "prompts",
    [None, (prompt for prompt in PROMPTS), "abc", 3, {0: [1]}, [None], ["abc"], [b"ab"], [3],
     [[True, False]], [[np.True_]], [torch.tensor([True])], [torch.tensor([1.0])], [[1.0]],
     [{1: 2}], torch.tensor([1, 2]), torch.tensor(1), [torch.tensor([[1, 2]])], [[2**70]]],
)  # fmt: skip
def test_prompts_that_are_not_lists_of_token_ids_are_refused(
    engine: sc.Engine, prompts: Any
) -> None:
    with pytest.raises(sc.BatchError, match=r"token"):
        engine.generate(prompts, PARAMS)


@pytest.mark.parametrize(
    "params",
    [{"n": 2}, [{"n": 2}], "x", [None], 3, (one for one in [PARAMS]), sc.SamplingParams],
)
def test_params_that_are_not_sampling_params_are_refused(engine: sc.Engine, params: Any) -> None:
    with pytest.raises(sc.ConfigError, match=r"must be SamplingParams"):
        engine.generate([[1]], params)
    with pytest.raises(sc.BatchError, match="2 prompts came with 1 SamplingParams"):
        engine.generate([[1], [2]], [PARAMS])


@pytest.mark.parametrize("kind", [np.array, torch.tensor, tuple, np.int32])
def test_prompts_of_any_library_are_the_same_prompts(engine: sc.Engine, kind: Any) -> None:
    given: Any = [[kind(i) for i in one] if kind is np.int32 else kind(one) for one in PROMPTS]
    assert engine.generate(given, PARAMS) == engine.generate(PROMPTS, PARAMS)


@pytest.mark.parametrize("scalar", ["numpy", "torch"])
def test_sampling_parameters_of_any_library_are_the_same_parameters(scalar: str) -> None:
    numpy = scalar == "numpy"
    given = {
        "n": np.int64(2) if numpy else torch.tensor(2),
        "top_k": np.uint8(3) if numpy else torch.tensor(3),
        "max_tokens": np.int32(7) if numpy else torch.tensor(7),
        "seed": np.int64(9) if numpy else torch.tensor(9),
        "temperature": np.float32(0.5) if numpy else torch.tensor(0.5),
        "top_p": np.float64(0.25) if numpy else torch.tensor(0.25),
        "stop_token_ids": np.array([1, 2]) if numpy else torch.tensor([1, 2]),
    }
    found = sc.SamplingParams(**given)  # type: ignore[arg-type]
    expected = sc.SamplingParams(
        n=2, top_k=3, max_tokens=7, seed=9, temperature=0.5, top_p=0.25, stop_token_ids=(1, 2)
    )
    assert repr(found) == repr(expected), "what is kept are Python's own values"
    assert hash(found) == hash(expected)


@pytest.mark.parametrize(
    "asked",
    [
        {"n": np.True_}, {"n": torch.tensor(True)}, {"n": torch.tensor([2])}, {"n": "2"},
        {"temperature": np.True_}, {"temperature": torch.tensor(True)}, {"top_p": 1j},
        {"temperature": 10**400}, {"temperature": np.float32("nan")}, {"top_p": torch.tensor([0.5])},
        {"stop_token_ids": torch.tensor(3)}, {"stop_token_ids": np.array([1.0])},
        {"stop_token_ids": torch.tensor([[1], [2]])}, {"stop_token_ids": np.array([True])},
        {"stop_token_ids": torch.tensor([True])}, {"seed": np.float64(1)},
    ],
    ids=str,
)  # fmt: skip
def test_numpy_and_torch_values_of_the_wrong_kind_are_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(sc.ConfigError, match=next(iter(asked))):
        sc.SamplingParams(**asked)


@pytest.mark.parametrize(
    "state",
    [None, 3, [("calls", 1), ("seed", 0)], {"calls": "x"}, {"calls": "x", "seed": 0},
     {"calls": 1.5, "seed": 0}, {"calls": 1, "seed": True}, {"calls": -1, "seed": 0}],
    ids=str,
)  # fmt: skip
def test_state_that_is_no_state_is_refused_and_changes_nothing(
    engine: sc.Engine, state: Any
) -> None:
    before = engine.state_dict()
    with pytest.raises(sc.ConfigError, match="state"):
        engine.load_state_dict(state)
    assert engine.state_dict() == before


class Export:
    """An update that counts what was read of it."""

    def __init__(self, items: list[Any]) -> None:
        self.items, self.read = items, 0

    def __call__(self) -> Any:
        for item in self.items:
            self.read += 1
            yield item


def test_refused_update_is_read_to_its_end_and_changes_nothing(target: Any) -> None:
    engine = sc.Engine(target)
    state = {name: value + 1 for name, value in target.state_dict().items()}
    items: list[Any] = list(state.items())
    name, value = items[0]
    cases: list[tuple[str, Any, Any, list[Any]]] = [
        ("'policy'", ["policy"], 1, items),
        ("'policy'", None, 1, items),
        ("'policy'", "draft", 1, items),
        ("version", "policy", "1", items),
        (r"found \(int, Tensor\)", "policy", 1, [(1, value), *items[1:]]),
        (r"found \(list, Tensor\)", "policy", 1, [([name], value), *items[1:]]),
        (r"found \(str, Tensor, int\)", "policy", 1, [(name, value, 1), *items[1:]]),
        ("found Tensor", "policy", 1, [value, *items[1:]]),
        ("found str", "policy", 1, [name, *items[1:]]),
        ("has no", "policy", 1, [("weigth", value), *items[1:]]),
        ("layout", "policy", 1, [(name, value.to_sparse()), *items[1:]]),
        ("has shape", "policy", 1, [(name, value[:1]), *items[1:]]),
    ]
    before = {name: value.clone() for name, value in engine._target.model.state_dict().items()}
    for message, which, version, update in cases:
        export = Export(update)
        with pytest.raises(sc.ConfigError, match=message):
            engine.update_weights(which, export(), version)
        assert export.read == len(update), message
    nothings: list[Any] = [None, 3, target]
    for nothing in nothings:
        with pytest.raises(sc.ConfigError, match="pairs or a state dict"):
            engine.update_weights("policy", nothing, 1)
    assert engine.weight_version == 0
    held = engine._target.model.state_dict()
    assert all(torch.equal(held[name], value) for name, value in before.items())


def test_error_of_the_export_itself_comes_through(target: Any) -> None:
    def broken() -> Any:
        yield from list(target.state_dict().items())[:3]
        raise RuntimeError("the wire is cut")

    with pytest.raises(RuntimeError, match="the wire is cut"):
        sc.Engine(target).update_weights("policy", broken(), 1)


def test_state_dict_is_an_update(target: Any) -> None:
    engine = sc.Engine(target)
    state = {name: value + 1 for name, value in target.state_dict().items()}
    engine.update_weights("policy", state, 4)
    held = engine._target.model.state_dict()
    assert all(torch.equal(held[name], value) for name, value in state.items())
    assert engine.weight_version == 4


@pytest.mark.parametrize("steps", [0, -1, "x", None, 2.0, True, (3,)], ids=str)
def test_draft_that_was_trained_for_no_number_of_steps_is_refused(target: Any, steps: Any) -> None:
    draft = BigramDraft(target)
    draft.ttt_length = steps
    with pytest.raises(
        sc.ConfigError, match=r"BigramDraft.ttt_length must be an int of at least 1"
    ):
        sc.Engine(target, draft)


@pytest.mark.parametrize(
    ("method", "result"),
    [("step", 3), ("step", None), ("step", "rows"), ("step", "three"), ("step", "numbers"),
     ("fuse", None), ("fuse", "rows"), ("logits", None), ("logits", "rows")],
)  # fmt: skip
def test_draft_that_returns_something_else_is_named(target: Any, method: str, result: Any) -> None:
    draft = BigramDraft(target)

    def junk(first: Tensor, *rest: Any) -> Any:
        short = first.new_zeros(len(first) + 1, first.shape[1])
        many: dict[Any, Any] = {
            "rows": (first, short) if method == "step" else short,
            "three": (first, first, first),
            "numbers": (first, 1.0),
        }
        return many.get(result, result)

    setattr(draft, method, junk)
    engine = sc.Engine(target, draft, num_speculative_tokens=2)
    with pytest.raises(sc.ConfigError, match=rf"BigramDraft.{method} must return .*found"):
        engine.generate(PROMPTS, PARAMS)


class PlacedDraft(BigramDraft):
    """A draft with a table of positions."""

    def __init__(self, target: Any, places: int) -> None:
        super().__init__(target)
        self.places = nn.Embedding(places, 32, dtype=torch.float64)

    def step(
        self, state: Tensor, embedded: Tensor, positions: Tensor, attend: Any
    ) -> tuple[Tensor, Tensor]:
        state, output = super().step(state, embedded, positions, attend)
        return state, output + 0.01 * self.places(positions)


def test_draft_is_never_asked_for_a_position_of_max_model_len(target: Any) -> None:
    draft = PlacedDraft(target, 14)
    engine = sc.Engine(target, draft, max_model_len=14, num_speculative_tokens=8)
    params = sc.SamplingParams(temperature=0.0, max_tokens=50, stop_token_ids=())
    found = drawn(engine.generate(PROMPTS, params))
    assert found == [greedy(target, prompt, 14 - len(prompt)) for prompt in PROMPTS]


def test_copied_engine_goes_on_like_the_original_and_by_itself(target: Any) -> None:
    engine = sc.Engine(target, eagle(target), num_speculative_tokens=2)
    other = copy.deepcopy(engine)
    params = sc.SamplingParams(max_tokens=6, stop_token_ids=())
    expected = engine.generate(PROMPTS, params)
    assert other.generate(PROMPTS, params) == expected
    other.update_weights("policy", {k: -v for k, v in target.state_dict().items()}, 1)
    again = sc.Engine(target, eagle(target), num_speculative_tokens=2)
    assert again.generate(PROMPTS, params) == expected
    assert other.generate(PROMPTS, params) != engine.generate(PROMPTS, params)
    again.generate(PROMPTS, params)
    assert engine.generate(PROMPTS, params) == again.generate(PROMPTS, params)


def test_surrounding_autocast_changes_nothing() -> None:
    target = near_bigram(dtype=torch.float32)
    engine = sc.Engine(target, eagle(target), num_speculative_tokens=2)
    expected = engine.generate(PROMPTS, PARAMS)
    with torch.autocast("cpu", torch.bfloat16):
        assert engine.generate(PROMPTS, PARAMS) == expected
        assert torch.is_autocast_enabled("cpu")
