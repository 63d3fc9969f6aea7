from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

import spec_compile as sc
from tests.models import randomise, tiny_qwen3
from tests.rollout.cases import PROMPTS, BigramDraft, eagle, greedy, near_bigram


def tokens(engine: sc.Engine, prompts: list[list[int]], **params: Any) -> list[list[int]]:
    asked = {"temperature": 0.0, "max_tokens": 17, "stop_token_ids": (), **params}
    return [one.tokens for one in engine.generate(prompts, sc.SamplingParams(**asked))]


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("stops", [(), (2, 5, 11)])
def test_speculative_output_equals_whole_forwards(batch: int, stops: tuple[int, ...]) -> None:
    target = near_bigram(context=0.6)
    expected = [greedy(target, prompt, 17, stops) for prompt in PROMPTS]
    engine = sc.Engine(target, BigramDraft(target), max_num_seqs=batch, num_speculative_tokens=3)
    assert tokens(engine, PROMPTS, stop_token_ids=stops) == expected
    stats = engine.stats
    assert 0 < sum(stats["accepted"]) < sum(stats["drafted"]), "the test needs both outcomes"
    plain = sc.Engine(target, max_num_seqs=batch)
    assert tokens(plain, PROMPTS, stop_token_ids=stops) == expected
    assert plain.stats["drafted"] == []


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_any_number_of_drafted_tokens_gives_the_same_output(steps: int) -> None:
    target = near_bigram(context=0.6)
    engine = sc.Engine(target, eagle(target), max_num_seqs=4, num_speculative_tokens=steps)
    assert tokens(engine, PROMPTS) == [greedy(target, prompt, 17) for prompt in PROMPTS]


def test_number_chosen_by_cost_gives_the_same_output() -> None:
    target = near_bigram(context=0.6)
    engine = sc.Engine(target, BigramDraft(target), max_num_seqs=3)
    assert tokens(engine, PROMPTS, max_tokens=60) == [greedy(target, p, 60) for p in PROMPTS]
    rounds = engine.stats["draft_tokens"]
    assert len(rounds) == 4
    assert rounds[0] > 0
    assert rounds[3] > 0


def mistral() -> Any:
    config = MistralConfig(
        num_hidden_layers=3, hidden_size=32, intermediate_size=40, vocab_size=31,
        num_attention_heads=4, num_key_value_heads=2, sliding_window=5, max_position_embeddings=128,
    )  # fmt: skip
    return randomise(nn.Module.to(MistralForCausalLM(config), torch.float64), 0)


def gpt_oss() -> Any:
    config = GptOssConfig(
        num_hidden_layers=2, hidden_size=32, intermediate_size=24, vocab_size=31, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, sliding_window=4, num_local_experts=2,
        num_experts_per_tok=1, max_position_embeddings=128, rope_parameters={"rope_type": "default",
        "rope_theta": 1000.0},
    )  # fmt: skip
    return randomise(nn.Module.to(GptOssForCausalLM(config), torch.float32), 0)


@pytest.mark.parametrize("make", [mistral, gpt_oss, tiny_qwen3])
def test_windows_sinks_and_head_norms_are_served(make: Any) -> None:
    target = make()
    engine = sc.Engine(
        target, eagle(target, 2), max_num_seqs=4, max_model_len=100, num_speculative_tokens=2
    )
    assert tokens(engine, PROMPTS[:5]) == [greedy(target, prompt, 17) for prompt in PROMPTS[:5]]


def scaled_llama(**rope: Any) -> Any:
    config = LlamaConfig(
        num_hidden_layers=2, hidden_size=32, intermediate_size=40, vocab_size=31,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        rope_parameters={"rope_theta": 100.0, "factor": 4.0, **rope},
    )  # fmt: skip
    return randomise(nn.Module.to(LlamaForCausalLM(config), torch.float64), 0)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear"},
        {"rope_type": "yarn", "original_max_position_embeddings": 16},
        {"rope_type": "llama3", "original_max_position_embeddings": 16, "low_freq_factor": 1.0,
         "high_freq_factor": 4.0},
    ],
    ids=lambda rope: str(rope["rope_type"]),
)  # fmt: skip
def test_rope_of_fixed_frequencies_is_served(rope: dict[str, Any]) -> None:
    target = scaled_llama(**rope)
    engine = sc.Engine(target, eagle(target, 2), max_num_seqs=4, num_speculative_tokens=2)
    assert tokens(engine, PROMPTS[:5]) == [greedy(target, prompt, 17) for prompt in PROMPTS[:5]]


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic"},
        {"rope_type": "longrope", "original_max_position_embeddings": 16, "short_factor": [1.0] * 4,
         "long_factor": [3.0] * 4},
    ],
    ids=lambda rope: str(rope["rope_type"]),
)  # fmt: skip
def test_rope_that_follows_the_longest_sequence_of_a_batch_is_refused(rope: dict[str, Any]) -> None:
    with pytest.raises(sc.ConfigError, match=f"rope_type='{rope['rope_type']}'"):
        sc.Engine(scaled_llama(**rope))


def test_rope_of_one_kind_of_layer_is_found() -> None:
    target = scaled_llama(rope_type="default")
    target.model.rotary_emb.rope_type = {"full_attention": "default", "sliding": "dynamic"}
    with pytest.raises(sc.ConfigError, match=r"model\.rotary_emb has rope_type='dynamic'"):
        sc.Engine(target)


def test_serving_leaves_the_modules_as_they_were() -> None:
    target = near_bigram()
    draft = eagle(target).train()
    before = target.config._attn_implementation
    state = {name: value.clone() for name, value in target.state_dict().items()}
    tokens(sc.Engine(target.train(), draft, num_speculative_tokens=2), PROMPTS)
    assert target.config._attn_implementation == before
    assert target.training
    assert draft.training
    assert all(torch.equal(value, state[name]) for name, value in target.state_dict().items())
    assert all(parameter.requires_grad for parameter in target.parameters())
    assert not target.model.layers[1]._forward_pre_hooks


def test_draft_that_was_not_asked_for_long_is_not_behind() -> None:
    """Its proposals after many rounds without it are those of a draft that was always asked."""
    target = near_bigram(context=0.6)

    def proposed(schedule: list[int]) -> list[torch.Tensor]:
        engine = sc.Engine(target, eagle(target), max_num_seqs=2)
        rounds = iter(schedule)
        engine._lengths.choose = lambda num_sequences: next(rounds)  # type: ignore[method-assign]
        seen: list[torch.Tensor] = []
        served: Any = engine._draft.model  # type: ignore[union-attr]
        served.lm_head.register_forward_hook(lambda m, i, out: seen.append(out.clone()))
        tokens(engine, [PROMPTS[2]], max_tokens=81)
        return seen

    always, late = proposed([1] * 80), proposed([0] * 75 + [1] * 5)
    torch.testing.assert_close(late[-1], always[-1], rtol=1e-9, atol=1e-9)
    assert len(late) < 6 < len(always)
