from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

import spec_compile as sc
from tests.rollout.cases import PROMPTS, completion_laws, greedy, near_bigram, predicted
from tests.rollout.families import FAMILIES, VARIANTS, constant_law, knowing, make
from tests.rollout.test_sampled import chi_square, two_layers

REDUCED = ("dflash reduced", "dspark reduced")


@pytest.mark.parametrize("family", [*FAMILIES, *VARIANTS])
@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.slow), 5])
def test_greedy_output_equals_whole_forwards(family: str, batch: int) -> None:
    target = near_bigram(7, context=0.6)
    prompts = [[token % 7 for token in prompt] for prompt in PROMPTS]
    engine = sc.Engine(target, make(family, target), max_num_seqs=batch, num_speculative_tokens=3)
    params = sc.SamplingParams(temperature=0.0, max_tokens=19, stop_token_ids=(3,))
    found = [one.tokens for one in engine.generate(prompts, params)]
    assert found == [greedy(target, prompt, 19, (3,)) for prompt in prompts]
    stats = engine.stats
    assert 0 < sum(stats["accepted"]) < sum(stats["drafted"]), "the test needs both outcomes"


@pytest.mark.parametrize(
    "family", [*FAMILIES, pytest.param("dspark reduced", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "asked", [{}, pytest.param({"temperature": 1.4, "top_k": 3}, marks=pytest.mark.slow)], ids=str
)
def test_samples_follow_the_enumerated_law(family: str, asked: dict[str, Any]) -> None:
    target, total = two_layers(), 3000
    params = sc.SamplingParams(n=total, max_tokens=4, stop_token_ids=(), seed=12, **asked)
    engine = sc.Engine(target, make(family, target), max_num_seqs=1024, num_speculative_tokens=2)
    counts = Counter(tuple(one.tokens) for one in engine.generate([[1, 3]], params))
    laws = completion_laws(target, [1, 3], 4, params)
    assert chi_square(counts, laws, total) > 1e-3
    stats = engine.stats
    assert 0 < sum(stats["accepted"]) < sum(stats["drafted"])


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_laws_accept_every_drafted_token(family: str) -> None:
    target = constant_law()
    engine = sc.Engine(target, knowing(family, target), num_speculative_tokens=3)
    params = sc.SamplingParams(n=3, max_tokens=21, stop_token_ids=(), seed=1)
    engine.generate(PROMPTS, params)
    stats = engine.stats
    assert sum(stats["drafted"]) > 300
    assert stats["accepted"] == stats["drafted"]


@pytest.mark.parametrize("family", FAMILIES)
def test_number_chosen_by_cost_changes_no_greedy_token(family: str) -> None:
    target = near_bigram(7, context=0.6)
    engine = sc.Engine(target, make(family, target), max_num_seqs=2)
    params = sc.SamplingParams(temperature=0.0, max_tokens=40, stop_token_ids=())
    found = [one.tokens for one in engine.generate([[1, 2], [5]], params)]
    assert found == [greedy(target, prompt, 40) for prompt in ([1, 2], [5])]
    rounds = engine.stats["draft_tokens"]
    assert rounds[0] > 0, "the draft must have fallen behind"
    assert rounds[-1] > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_seeded_sample_does_not_depend_on_what_shares_the_batch(family: str) -> None:
    target = near_bigram(11, context=0.6)
    params = sc.SamplingParams(max_tokens=12, seed=7, stop_token_ids=(4,))
    prompts = [[token % 11 for token in prompt] for prompt in PROMPTS]
    together = sc.Engine(target, make(family, target), max_num_seqs=8).generate(prompts, params)
    single = sc.Engine(target, make(family, target), max_num_seqs=1).generate(prompts, params)
    assert [one.tokens for one in together] == [one.tokens for one in single]


@pytest.mark.slow
@pytest.mark.parametrize("family", [*FAMILIES, *REDUCED])
def test_predicted_acceptance_of_the_first_token_is_what_the_engine_measures(family: str) -> None:
    target, total = near_bigram(7, context=0.6), 400
    draft = make(family, target)
    engine = sc.Engine(target, draft, max_num_seqs=512, num_speculative_tokens=1)
    prompts = [[token % 7 for token in prompt] for prompt in PROMPTS]
    # prompt, a first token, then one drafted token: every round is at the same place
    params = sc.SamplingParams(n=total // len(prompts), max_tokens=2, stop_token_ids=(), seed=3)
    rollouts = engine.generate(prompts, params)
    stats = engine.stats
    documents = [prompts[one.prompt_index] + one.tokens for one in rollouts]
    expected = predicted(target, draft, documents)
    assert stats["drafted"] == [total]
    error = (expected * (1 - expected) / total) ** 0.5
    assert abs(stats["accepted"][0] / total - expected) < 3 * error


def confident(family: str, target: Any, bias: float) -> Any:
    """Make a draft whose confidence swings around a logit of ``bias``."""
    draft = make(family, target)
    with torch.no_grad():
        draft.confidence_head.proj.weight.mul_(0.5)
        draft.confidence_head.proj.bias.fill_(bias)
    return draft


@pytest.mark.slow
def test_low_confidence_cuts_the_draft_and_leaves_the_law() -> None:
    target, total = two_layers(), 3000
    params = sc.SamplingParams(n=total, max_tokens=4, stop_token_ids=(), seed=13)
    draft = confident("dspark", target, 0.5)
    laws = completion_laws(target, [1, 3], 4, params)
    drafted = []
    for threshold in (0.0, 0.6):
        engine = sc.Engine(
            target, draft, max_num_seqs=1024, num_speculative_tokens=2, min_confidence=threshold
        )
        counts = Counter(tuple(one.tokens) for one in engine.generate([[1, 3]], params))
        assert chi_square(counts, laws, total) > 1e-3
        drafted.append(engine.stats["drafted"])
    assert 0 < drafted[1][0] < drafted[0][0]
    assert 0 < drafted[1][1] < drafted[0][1]


def test_confidence_below_the_threshold_everywhere_drafts_nothing() -> None:
    target = near_bigram(7)
    engine = sc.Engine(
        target, confident("dspark", target, -30.0), num_speculative_tokens=3, min_confidence=0.5
    )
    params = sc.SamplingParams(temperature=0.0, max_tokens=9, stop_token_ids=())
    assert engine.generate([[1, 2]], params)[0].tokens == greedy(target, [1, 2], 9)
    stats = engine.stats
    assert stats["drafted"] == [0, 0, 0]
    assert stats["verify_steps"] == 8


def test_impossible_numbers_are_refused() -> None:
    target = near_bigram()
    with pytest.raises(sc.ConfigError, match="more than the 3 tokens that a block of DFlash"):
        sc.Engine(target, make("dflash", target), num_speculative_tokens=4)
    with pytest.raises(sc.ConfigError, match="needs a draft with a confidence head"):
        sc.Engine(target, make("dflash", target), min_confidence=0.5)
    with pytest.raises(sc.ConfigError, match="from 0 to 1, found 2"):
        sc.Engine(target, make("dspark", target), min_confidence=2)
    odd = make("mtp", target)
    odd.served_as = "oracle"
    with pytest.raises(sc.ConfigError, match="must be one of chain, parallel, block"):
        sc.Engine(target, odd)


@pytest.mark.parametrize("family", FAMILIES)
def test_new_weights_of_a_draft_are_taken(family: str) -> None:
    target = constant_law()
    engine = sc.Engine(target, make(family, target), num_speculative_tokens=2)
    params = sc.SamplingParams(n=4, max_tokens=9, stop_token_ids=(), seed=1)
    engine.generate(PROMPTS, params)
    before = engine.stats
    named: dict[str, Tensor] = knowing(family, target).state_dict()
    engine.update_weights("draft", named, 1)
    engine.generate(PROMPTS, params)
    after = engine.stats
    assert sum(before["accepted"]) < sum(before["drafted"])
    assert after["accepted"] == after["drafted"]
