from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import spec_compile as sc
from spec_compile.drafts import Eagle3
from spec_compile.runtime.rollout.draft_length import PROBE_ROUNDS, DraftLength, Timing
from spec_compile.runtime.rollout.drafters import ServedChain
from spec_compile.runtime.rollout.drafting import TargetEnds, Unread
from tests.models import gated_draft, packed_batch, tiny_llama, tiny_qwen3
from tests.oracle import draft_inputs, run_target
from tests.rollout.cases import PROMPTS, BigramDraft, eagle, near_bigram


@pytest.mark.parametrize("options", [{}, {"norm_output": True, "fc_norm": True}, {"qk_norm": True}])
def test_served_logits_equal_those_of_training_at_every_row_and_step(
    options: dict[str, Any],
) -> None:
    target, steps, lengths = tiny_qwen3(), 4, (11, 6)
    draft = eagle(target, steps, **options)
    batch = packed_batch(lengths, vocab=61, draft_mask=True)
    inputs = draft_inputs(target, batch, run_target(target, batch, draft.taps, grad=False))
    trained = training_logits(draft, inputs)
    checked = 0
    with torch.no_grad():
        for first, length in ((0, 11), (11, 6)):
            tokens = inputs.tokens[first : first + length]
            served = chain(draft, target)
            for t in range(length - 1):
                rows = slice(first + t, first + t + 1)
                unread = Unread([1], [t], tokens[t + 1 : t + 2], [inputs.features[rows]])
                state, output = served.feed(unread)
                for k in range(min(steps, length - 1 - t)):
                    if k:
                        token = tokens[t + 1 + k : t + 2 + k]
                        state, output = served.advance([1], [t + k], token, state)
                    found = served.logits(output)[0]
                    torch.testing.assert_close(found, trained[k][first + t], rtol=1e-11, atol=1e-11)
                    checked += 1
    assert checked == (10 + 9 + 8 + 7) + (5 + 4 + 3 + 2)


def chain(draft: Any, target: Any) -> ServedChain:
    vocab = target.config.vocab_size
    ends = TargetEnds(target.get_input_embeddings(), target.get_output_embeddings(), vocab)
    return ServedChain(draft, ends, last_position=99)


def training_logits(draft: Eagle3, inputs: sc.DraftInputs) -> list[Tensor]:
    """What each step of the training forward feeds to the head, times the head."""
    seen: list[Tensor] = []
    handle = draft.norm.register_forward_hook(lambda _m, _i, out: seen.append(out))
    with torch.no_grad():
        draft(inputs)
    handle.remove()
    return [F.linear(state, draft.lm_head.weight) for state in seen]


def test_rows_fed_together_equal_rows_fed_one_by_one() -> None:
    target = tiny_llama()
    draft = eagle(target)
    served = [chain(draft, target) for _ in range(2)]
    features = torch.randn(9, 3 * 32, dtype=torch.float64)
    tokens = torch.arange(9)
    with torch.no_grad():
        together = served[0].feed(Unread([2, 0], [0, 0], tokens, [features[:5], features[5:]]))
        for t in range(5):
            long = served[1].feed(Unread([2], [t], tokens[t : t + 1], [features[t : t + 1]]))
        for t in range(4):
            short = served[1].feed(
                Unread([0], [t], tokens[5 + t : 6 + t], [features[5 + t : 6 + t]])
            )
    for row, single in enumerate((long, short)):
        for found, expected in zip(together, single, strict=True):
            torch.testing.assert_close(found[row], expected[0], rtol=1e-11, atol=1e-11)


def test_draft_that_cannot_be_served_says_what_it_lacks() -> None:
    target = tiny_llama()
    with pytest.raises(
        sc.ConfigError, match=r"GatedDraft cannot be served: it lacks fuse, step, logits"
    ):
        sc.Engine(target, gated_draft(target))
    with pytest.raises(sc.ConfigError, match="tap 7 does not exist"):
        sc.Engine(target, Eagle3.from_target(tiny_llama(layers=9), taps=(1, 7)))


def test_draft_over_another_vocabulary_is_refused() -> None:
    target = tiny_llama(vocab=23)
    engine = sc.Engine(target, BigramDraft(tiny_llama(vocab=22)), num_speculative_tokens=1)
    with pytest.raises(sc.ConfigError, match="gives 22 tokens, the target has 23"):
        engine.generate(PROMPTS)


def run_rounds(chooser: DraftLength, rounds: int, seconds: float, share: float) -> list[int]:
    """Run rounds of 8 sequences whose target takes 1 s, and whose draft tokens are kept by share."""
    chosen = []
    for _ in range(rounds):
        k = chooser.choose(8)
        chosen.append(k)
        if k:
            chooser.observe_draft(8, seconds)
        for _ in range(k - 1):
            chooser.observe_chain(8, seconds)
        chooser.observe_verify(8 * (k + 1), 1.0 + 0.01 * k)
        kept = [round(1000 * share ** (j + 1)) for j in range(k)]
        chooser.observe_kept([1000] * k, kept)
    return chosen


def test_cheap_draft_that_is_often_right_drafts_all() -> None:
    chooser = DraftLength(5)
    assert set(run_rounds(chooser, 40, 0.01, 0.9)[4:]) == {5}
    assert 1.0 < chooser.break_even < 1.3


def test_costly_draft_that_is_seldom_right_is_left_out_but_probed() -> None:
    chooser = DraftLength(5)
    chosen = run_rounds(chooser, 4 * PROBE_ROUNDS, 0.5, 0.1)[8:]
    assert chosen.count(0) > 0.95 * len(chosen)
    assert sum(k > 0 for k in chosen) >= 2
    assert chooser.break_even > 1.4


def test_number_follows_cost_in_between() -> None:
    chooser = DraftLength(5)
    chosen = run_rounds(chooser, 60, 0.12, 0.5)[8:]
    lengths = [sum(0.5**j for j in range(k + 1)) for k in range(6)]
    rates = [length / (1 + 0.13 * k) for k, length in enumerate(lengths)]
    assert set(chosen[-20:]) == {rates.index(max(rates))}
    assert 0 < chosen[-1] < 5


def test_draft_that_becomes_good_comes_back() -> None:
    chooser = DraftLength(3)
    assert run_rounds(chooser, 60, 0.05, 0.0)[-1] == 0
    later = run_rounds(chooser, 6 * PROBE_ROUNDS, 0.05, 0.95)
    assert later[-1] == 3


def test_times_of_unseen_sizes_lie_on_lines_through_seen_ones() -> None:
    timing = Timing()
    assert timing.predict(3) is None
    for rows, seconds in ((8, 1.0), (8, 9.0), (8, 1.0), (16, 2.0)):
        timing.observe(rows, seconds)
    assert timing.predict(8) == 1.0
    assert timing.predict(12) == pytest.approx(1.5)
    assert timing.predict(32) == pytest.approx(4.0)
    assert timing.predict(4) == pytest.approx(0.5)


@pytest.mark.parametrize(("seed", "rounds"), [(5, {3}), (None, {0, 3})])
def test_requests_with_a_seed_use_a_fixed_number(seed: int | None, rounds: set[int]) -> None:
    target = near_bigram()
    engine = sc.Engine(target, eagle(target, 3), max_num_seqs=4)
    params = sc.SamplingParams(max_tokens=20, seed=seed, stop_token_ids=())
    engine.generate(PROMPTS, params)
    assert {k for k, count in enumerate(engine.stats["draft_tokens"]) if count} >= rounds
    if seed is not None:
        engine.generate(PROMPTS, params)
        assert engine.stats["draft_tokens"][:3] == [0, 0, 0]
    engine.num_speculative_tokens = 1
    engine.generate(PROMPTS, params)
    assert [k for k, count in enumerate(engine.stats["draft_tokens"]) if count] == [1]
