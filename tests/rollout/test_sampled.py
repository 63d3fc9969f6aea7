from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

import spec_compile as sc
from spec_compile.runtime.rollout.randomness import Purpose, sequence_key, uniforms
from spec_compile.runtime.rollout.sampling import RowParams, draw, log_law
from tests.rollout.cases import PROMPTS, BigramDraft, completion_laws, eagle, law, near_bigram


def chi_square(counts: Counter[Any], laws: dict[Any, float], total: int) -> float:
    """Chance of a fit at least as bad, cells with few expected pooled."""
    statistic, cells, rest_seen, rest_expected = 0.0, 0, 0.0, 0.0
    for outcome, chance in laws.items():
        expected = chance * total
        if expected < 5:
            rest_seen, rest_expected = rest_seen + counts[outcome], rest_expected + expected
        else:
            statistic += (counts[outcome] - expected) ** 2 / expected
            cells += 1
    if rest_expected > 0:
        statistic += (rest_seen - rest_expected) ** 2 / rest_expected
        cells += 1
    half = torch.tensor([(cells - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


LAWS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.5, "top_k": 3},
    {"temperature": 1.2, "top_p": 0.8},
    {"top_k": 4, "top_p": 0.7},
]


def two_layers() -> Any:
    return near_bigram(5, context=0.6, layers=2, dtype=torch.float64)


@pytest.mark.parametrize("asked", LAWS, ids=str)
@pytest.mark.parametrize("kind", ["bigram", "noisy", "none"])
def test_samples_follow_the_enumerated_law(kind: str, asked: dict[str, Any]) -> None:
    target, total = two_layers(), 3000
    drafts: dict[str, Any] = {"bigram": 0.0, "noisy": 0.6}
    draft = BigramDraft(target, drafts[kind]) if kind in drafts else None
    params = sc.SamplingParams(n=total, max_tokens=4, stop_token_ids=(), seed=11, **asked)
    engine = sc.Engine(
        target, draft, max_num_seqs=1024, num_speculative_tokens=2 if draft else None
    )
    rollouts = engine.generate([[1, 3]], params)
    counts = Counter(tuple(one.tokens) for one in rollouts)
    laws = completion_laws(target, [1, 3], 4, params)
    assert abs(sum(laws.values()) - 1) < 1e-9
    assert all(laws[outcome] > 0 for outcome in counts), "a token that was cut came out"
    assert chi_square(counts, laws, total) > 1e-3
    stats = engine.stats
    if draft:
        assert 0 < sum(stats["accepted"]) < sum(stats["drafted"])


def test_the_chi_square_test_sees_a_wrong_law() -> None:
    target = two_layers()
    params = sc.SamplingParams(n=3000, max_tokens=4, stop_token_ids=(), seed=11, temperature=1.1)
    rollouts = sc.Engine(target, max_num_seqs=1024).generate([[1, 3]], params)
    counts = Counter(tuple(one.tokens) for one in rollouts)
    assert chi_square(counts, completion_laws(target, [1, 3], 4, sc.SamplingParams()), 3000) < 1e-3


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_equal_laws_accept_every_drafted_token(temperature: float) -> None:
    target = near_bigram(context=0.0)
    engine = sc.Engine(target, BigramDraft(target), num_speculative_tokens=3)
    params = sc.SamplingParams(n=4, temperature=temperature, max_tokens=21, stop_token_ids=())
    engine.generate(PROMPTS, params)
    stats = engine.stats
    assert stats["accepted"] == stats["drafted"]
    assert stats["tokens"] == 4 * len(PROMPTS) * 21
    assert stats["seconds"] > 0
    assert engine.stats["tokens"] == 0, "reading starts anew"


@pytest.mark.parametrize("asked", [*LAWS, {"temperature": 0.0}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_logprobs_equal_a_fresh_forward(dtype: torch.dtype, asked: dict[str, Any]) -> None:
    target = near_bigram(context=0.6, dtype=dtype)
    params = sc.SamplingParams(n=2, max_tokens=13, stop_token_ids=(), seed=3, **asked)
    engine = sc.Engine(target, BigramDraft(target, 0.1), max_num_seqs=5, num_speculative_tokens=3)
    scored = params if params.temperature else sc.SamplingParams()
    for rollout in engine.generate(PROMPTS, params):
        ids = [*PROMPTS[rollout.prompt_index], *rollout.tokens]
        with torch.no_grad():
            logits = target(torch.tensor([ids]), use_cache=False).logits[0].double()
        first = len(PROMPTS[rollout.prompt_index]) - 1
        for offset, (token, logprob) in enumerate(
            zip(rollout.tokens, rollout.logprobs, strict=True)
        ):
            chance = law(logits[first + offset].tolist(), scored)[token]
            assert abs(logprob - math.log(chance)) < 1e-4


def test_seeded_sample_is_the_same_alone_batched_and_repeated() -> None:
    target = near_bigram(context=0.6)
    params = sc.SamplingParams(n=3, max_tokens=12, seed=7, stop_token_ids=(4,))
    engine = sc.Engine(target, eagle(target), max_num_seqs=8)
    together = engine.generate(PROMPTS, params)
    assert engine.generate(PROMPTS, params) == together
    single = sc.Engine(target, eagle(target), max_num_seqs=1).generate(PROMPTS[:2], params)
    for one, other in zip(single, together[:6], strict=True):
        assert one.tokens == other.tokens
        # products of other sizes may round differently
        assert one.logprobs == pytest.approx(other.logprobs, rel=1e-9, abs=1e-9)
    alone = sc.SamplingParams(n=1, max_tokens=12, seed=7, stop_token_ids=(4,))
    assert engine.generate(PROMPTS[:1], alone)[0].tokens == together[0].tokens
    assert len({tuple(one.tokens) for one in together}) > 20
    reseeded = sc.SamplingParams(n=3, max_tokens=12, seed=8, stop_token_ids=(4,))
    assert engine.generate(PROMPTS, reseeded) != together


def test_without_a_seed_the_engine_counts_on_and_its_count_is_saved() -> None:
    target = near_bigram()
    params = sc.SamplingParams(max_tokens=12, stop_token_ids=())
    engine = sc.Engine(target)
    first, state = engine.generate(PROMPTS, params), engine.state_dict()
    second = engine.generate(PROMPTS, params)
    assert first != second
    again = sc.Engine(target)
    again.load_state_dict(state)
    assert again.generate(PROMPTS, params) == second
    assert sc.Engine(target, seed=1).generate(PROMPTS, params) != first


def test_top_k_keeps_exactly_k_of_equal_tokens() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0], [1.0, 1.0, 1.0, 1.0, 1.0]])
    params = [sc.SamplingParams(top_k=2), sc.SamplingParams(top_p=0.5)]
    kept = log_law(logits, RowParams.of(params, logits.device)).isfinite().tolist()
    assert kept == [[False, True, True, False, False], [True, True, True, False, False]]


def test_rows_of_one_batch_have_their_own_parameters() -> None:
    logits = torch.randn(6, 40, dtype=torch.float64)
    asked: list[dict[str, Any]] = [{"temperature": 0.0}, *LAWS]
    params = [sc.SamplingParams(**one) for one in asked]
    found = log_law(logits, RowParams.of(params, logits.device)).exp()
    for row, one, computed in zip(logits, params, found, strict=True):
        expected = law(row.tolist(), one if one.temperature else sc.SamplingParams())
        torch.testing.assert_close(computed, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rows_that_are_not_numbers_become_nan(bad: float) -> None:
    logits = torch.tensor([[0.0, bad, 1.0], [0.0, -math.inf, 1.0]])
    settings: list[dict[str, Any]] = [{}, {"top_k": 1}, {"top_p": 0.5}]
    for asked in settings:
        params = RowParams.of([sc.SamplingParams(**asked)] * 2, logits.device)
        found = log_law(logits, params)
        assert found[0].isnan().all()
        assert not found[1].isnan().any()


def test_draws_never_give_a_token_without_weight() -> None:
    weights = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0]]).expand(4, -1)
    ends = torch.tensor([0.0, 0.2999999, 0.3000001, 1 - 2**-53], dtype=torch.float64)
    assert draw(weights, ends).tolist() == [1, 1, 3, 3]


def test_uniform_numbers_are_uniform_and_streams_are_disjoint() -> None:
    keys = [sequence_key(2, 7, prompt, sample) for prompt in range(20) for sample in range(10)]
    positions = torch.arange(500).expand(200, -1)
    streams: list[Tensor] = [uniforms(keys, positions, purpose) for purpose in Purpose]
    numbers = torch.stack(streams).flatten()
    assert float(numbers.min()) >= 0
    assert float(numbers.max()) < 1
    counts = torch.histc(numbers.float(), 100, 0, 1).double()
    expected = len(numbers) / 100
    statistic = ((counts - expected) ** 2 / expected).sum() / 2
    assert float(torch.special.gammaincc(torch.tensor(49.5).double(), statistic)) > 1e-3
    assert len(numbers.unique()) == len(numbers)
    pairs = torch.corrcoef(torch.stack([one.flatten() for one in streams]))
    assert float((pairs - torch.eye(3).double()).abs().max()) < 0.015
    along = torch.corrcoef(torch.stack([streams[0][:, :-1].flatten(), streams[0][:, 1:].flatten()]))
    assert abs(float(along[0, 1])) < 0.015
