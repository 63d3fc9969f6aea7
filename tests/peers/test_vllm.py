"""vLLM, for real, on the CPU: it loads exported drafts and accepts what was predicted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import spec_compile as sc
from tests.models import gated_draft
from tests.peers.toy_language import VOCAB, documents, new_target, train
from tests.rollout.cases import completion_laws, predicted
from tests.rollout.test_sampled import chi_square

pytestmark = [pytest.mark.slow, pytest.mark.peers("vllm"), pytest.mark.timeout(900)]
KNOWN = torch.arange(VOCAB)[torch.arange(VOCAB) % 5 != 1]
"""Tokens of the reduced drafts' own vocabulary."""
DRAFTS: dict[str, Any] = {
    "eagle3": lambda t: sc.drafts.Eagle3.from_target(t, 3, taps=(1, 2, 3)),
    "eagle3 reduced": lambda t: sc.drafts.Eagle3.from_target(
        t, 3, taps=(1, 2, 3), draft_vocab=KNOWN, qk_norm=True, fc_norm=True, norm_output=True
    ),
    "peagle": lambda t: sc.drafts.PEagle.from_target(t, 4, taps=(1, 2, 3), num_hidden_layers=2),
    "peagle reduced": lambda t: sc.drafts.PEagle.from_target(
        t, 3, taps=(1, 3), num_hidden_layers=2, draft_vocab=KNOWN, qk_norm=True
    ),
    "dflash": lambda t: sc.drafts.DFlash.from_target(t, 4, taps=(1, 3), num_hidden_layers=2),
    "eagle3 of two layers": lambda t: sc.drafts.Eagle3.from_target(
        t, 3, taps=(1, 2, 3), num_hidden_layers=2
    ),
    "dflash reduced": lambda t: sc.drafts.DFlash.from_target(
        t, 4, taps=(1, 3), num_hidden_layers=2, draft_vocab=torch.arange(VOCAB // 8, VOCAB)
    ),
}
SAMPLES = 1200


@pytest.fixture(scope="module")
def target() -> Any:
    made = new_target()
    train(made, None, 150)
    return made


@pytest.fixture(scope="module", params=DRAFTS)
def served(request: pytest.FixtureRequest, target: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Start vLLM with an untrained draft; give it, the trained draft, and what was exported."""
    import os

    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    draft = DRAFTS[request.param](target)
    engine = sc.vllm_engine(
        target, draft, max_num_seqs=64, max_model_len=64, dtype="float32", num_speculative_tokens=3
    )
    exported = train(target, draft, 150)
    yield engine, draft, exported
    engine.close()


def prompts(number: int) -> list[list[int]]:
    found: list[list[int]] = documents(number, 8, seed=1000).tolist()
    return found


def test_exported_draft_is_accepted_as_often_as_predicted(
    served: tuple[Any, Any, Any], target: Any
) -> None:
    engine, draft, exported = served
    asked = prompts(SAMPLES)
    # a first token from the prompt, then one round: every draft is at the same place
    params = sc.SamplingParams(max_tokens=2, stop_token_ids=(), seed=5)
    _ = engine.stats
    engine.generate(asked, params)
    untrained = engine.stats["accepted"][0] / SAMPLES
    engine.update_weights("draft", exported, 1)
    rollouts = engine.generate(asked, params)
    stats = engine.stats
    assert stats["verify_steps"] == SAMPLES
    measured = stats["accepted"][0] / SAMPLES
    rows = [ids + one.tokens for ids, one in zip(asked, rollouts, strict=True)]
    expected = predicted(target, draft, rows)
    print(f"untrained {untrained:.3f}, predicted {expected:.4f}, measured {measured:.4f}")
    assert untrained < 0.45 < expected
    assert abs(measured - expected) < 3 * (expected * (1 - expected) / SAMPLES) ** 0.5


def test_acceptance_by_position_is_that_of_the_embedded_engine(
    served: tuple[Any, Any, Any], target: Any
) -> None:
    engine, draft, exported = served
    engine.update_weights("draft", exported, 1)
    assert_same_positions(engine, sc.Engine(target, draft, num_speculative_tokens=3))


@pytest.mark.parametrize("served", ["peagle"], indirect=True)
def test_update_reaches_what_a_peagle_reads_in_the_place_of_features(
    served: tuple[Any, Any, Any], target: Any
) -> None:
    engine, draft, exported = served
    odd = 30 * torch.randn(exported["mask_hidden"].shape, generator=torch.manual_seed(3))
    changed = {**exported, "mask_hidden": odd}
    own = sc.Engine(target, draft, num_speculative_tokens=3)
    own.update_weights("draft", changed, 2)
    engine.update_weights("draft", exported, 1)
    usual = assert_same_positions(engine, sc.Engine(target, draft, num_speculative_tokens=3))
    engine.update_weights("draft", changed, 2)
    found = assert_same_positions(engine, own)
    assert found[0] == pytest.approx(usual[0], abs=0.1)
    assert found[1] < usual[1] - 0.05


def assert_same_positions(engine: Any, own: Any) -> list[float]:
    """Give vLLM's acceptance by position, which must be that of the embedded engine."""
    params = sc.SamplingParams(max_tokens=24, stop_token_ids=(), seed=6)
    shares, rounds = [], []
    for one in (engine, own):
        _ = one.stats
        one.generate(prompts(100), params)
        stats = one.stats
        rounds.append(stats["verify_steps"])
        pairs = zip(stats["accepted"], stats["drafted"], strict=True)
        shares.append([accepted / drafted for accepted, drafted in pairs])
    print("by position", shares, rounds)
    for a, b in zip(*shares, strict=True):
        # rounds of one completion are not independent: twice the variance of independent ones
        error = (2 * b * (1 - b) * (1 / rounds[0] + 1 / rounds[1])) ** 0.5
        assert abs(a - b) < 3 * error + 0.02
    return shares[0]


def test_greedy_output_is_that_of_the_embedded_engine(
    served: tuple[Any, Any, Any], target: Any
) -> None:
    engine, _, _ = served
    params = sc.SamplingParams(temperature=0.0, max_tokens=20, stop_token_ids=(3, 9))
    found = engine.generate(prompts(12), params)
    expected = sc.Engine(target).generate(prompts(12), params)
    for one, other in zip(found, expected, strict=True):
        assert (one.tokens, one.finish_reason) == (other.tokens, other.finish_reason)
        assert one.logprobs == pytest.approx(other.logprobs, abs=2e-3)


@pytest.mark.parametrize("asked", [{}, {"temperature": 0.7, "top_k": 5}], ids=str)
def test_samples_follow_the_law_and_report_its_logprobs(
    served: tuple[Any, Any, Any], target: Any, asked: dict[str, Any]
) -> None:
    engine, _, exported = served
    engine.update_weights("draft", exported, 1)
    params = sc.SamplingParams(n=1500, max_tokens=2, stop_token_ids=(), seed=8, **asked)
    prompt = documents(1, 6, seed=77)[0].tolist()
    rollouts = engine.generate([prompt], params)
    laws = completion_laws(target, prompt, 2, params)
    counts = Counter(tuple(one.tokens) for one in rollouts)
    assert chi_square(counts, laws, 1500) > 1e-3
    for one in rollouts[:50]:
        chance = laws[tuple(one.tokens)]
        assert sum(one.logprobs) == pytest.approx(torch.tensor(chance).log().item(), abs=2e-3)


def test_seeded_samples_come_back(served: tuple[Any, Any, Any]) -> None:
    engine, _, _ = served
    params = sc.SamplingParams(n=2, max_tokens=8, seed=3, stop_token_ids=())
    together = engine.generate(prompts(4), params)
    assert [one.tokens for one in engine.generate(prompts(4), params)] == [
        one.tokens for one in together
    ]
    part = engine.generate(prompts(4), params, only=[1, 6])
    assert [one.tokens for one in part] == [together[1].tokens, together[6].tokens]


def test_new_policy_is_served_and_incomplete_ones_are_refused(
    served: tuple[Any, Any, Any], target: Any
) -> None:
    engine, _, _ = served
    old = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    other = new_target()
    params = sc.SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=())
    before = [one.tokens for one in engine.generate(prompts(6), params)]
    partial = dict(list(other.state_dict().items())[:-1])
    with pytest.raises(sc.ConfigError, match="is incomplete: 1 of"):
        engine.update_weights("policy", partial, 7)
    with pytest.raises(sc.ConfigError, match="has no 'odd'"):
        engine.update_weights("policy", {**other.state_dict(), "odd": torch.zeros(1)}, 7)
    assert [one.tokens for one in engine.generate(prompts(6), params)] == before
    engine.update_weights("policy", other.state_dict(), 7)
    found = engine.generate(prompts(6), params)
    expected = sc.Engine(other).generate(prompts(6), params)
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    assert {one.weight_version for one in found} == {7}
    engine.update_weights("policy", old, 8)
    assert [one.tokens for one in engine.generate(prompts(6), params)] == before
    assert other.config.vocab_size == VOCAB


def test_dspark_is_refused_where_vllm_has_not_the_runner_for_it(target: Any) -> None:
    dspark = sc.drafts.DSpark.from_target(target, 3, taps=(1, 3), num_hidden_layers=1)
    message = r"DSpark in its newer model runner alone.* found no Triton.* sc.Engine serves it"
    with pytest.raises(sc.ConfigError, match=message):
        sc.vllm_engine(target, dspark, max_model_len=64, dtype="float32")


def test_mtp_and_drafts_of_ones_own_are_refused(target: Any) -> None:
    with pytest.raises(sc.ConfigError, match="reads MTP layers from the target's own checkpoint"):
        sc.vllm_engine(target, sc.drafts.MTP.from_target(target, 2), max_model_len=64)
    with pytest.raises(sc.ConfigError, match=r"expected an Eagle3, .* found GatedDraft"):
        sc.vllm_engine(target, gated_draft(target), max_model_len=64)
