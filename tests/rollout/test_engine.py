from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Gemma2Config, Gemma2ForCausalLM

import spec_compile as sc
from tests.models import packed_batch, tiny_llama
from tests.rollout.cases import PROMPTS, BigramDraft, eagle, greedy, near_bigram

GREEDY: dict[str, Any] = {"temperature": 0.0, "stop_token_ids": ()}


class Letters:
    """A tokenizer: token 0 is "a", 1 is "b", ...; token 22 is half a character."""

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join("" if token == 22 else chr(97 + token) for token in ids)


def test_results_come_in_the_order_of_prompts_and_samples() -> None:
    engine = sc.Engine(near_bigram(), max_num_seqs=3)
    rollouts = engine.generate(PROMPTS, sc.SamplingParams(n=3, max_tokens=5, temperature=2.0))
    assert [one.prompt_index for one in rollouts] == [i for i in range(8) for _ in range(3)]


@pytest.mark.parametrize("limit", range(1, 8))
def test_max_tokens_cuts_inside_an_accepted_chain(limit: int) -> None:
    target = near_bigram(context=0.0)
    engine = sc.Engine(target, BigramDraft(target), num_speculative_tokens=3)
    rollouts = engine.generate(PROMPTS, sc.SamplingParams(max_tokens=limit, **GREEDY))
    for prompt, one in zip(PROMPTS, rollouts, strict=True):
        assert one.tokens == greedy(target, prompt, limit)
        assert len(one.logprobs) == limit
        assert one.finish_reason == "length"


def test_tokens_accepted_after_a_stop_are_cut() -> None:
    target = near_bigram(context=0.0)
    whole = greedy(target, PROMPTS[0], 12)
    engine = sc.Engine(target, BigramDraft(target), num_speculative_tokens=5)
    for token in set(whole):
        params = sc.SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=(token,))
        (one,) = engine.generate(PROMPTS[:1], params)
        assert one.tokens == whole[: whole.index(token) + 1]
        assert one.finish_reason == "stop"
        assert len(one.logprobs) == len(one.tokens)


def test_end_tokens_come_from_the_generation_config() -> None:
    target = near_bigram()
    whole = greedy(target, PROMPTS[0], 12)
    target.generation_config.eos_token_id = [whole[3], 99]
    engine = sc.Engine(target)
    params: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12}

    def tokens(**more: Any) -> list[int]:
        return engine.generate(PROMPTS[:1], sc.SamplingParams(**params, **more))[0].tokens

    assert tokens() == whole[: whole.index(whole[3]) + 1]
    assert tokens(ignore_eos=True) == whole
    assert tokens(stop_token_ids=()) == whole
    assert tokens(stop_token_ids=(whole[1],), ignore_eos=True) == whole[: whole.index(whole[1]) + 1]


def test_stop_string_over_several_tokens_ends_a_completion() -> None:
    target = near_bigram()
    whole = greedy(target, PROMPTS[2], 90)
    text = Letters().decode(whole)
    engine = sc.Engine(target, BigramDraft(target), tokenizer=Letters(), num_speculative_tokens=3)
    for start in (0, 5, 70):
        stop = text[start : start + 3]
        params = sc.SamplingParams(max_tokens=90, stop=("zzz", stop), **GREEDY)
        (one,) = engine.generate([PROMPTS[2]], params)
        assert one.finish_reason == "stop"
        assert Letters().decode(one.tokens) == text[: text.index(stop) + 3]
    with pytest.raises(sc.ConfigError, match="tokenizer"):
        sc.Engine(target).generate(PROMPTS, sc.SamplingParams(stop=("x",)))


def test_completion_ends_at_max_model_len_and_longer_prompts_are_refused_before_anything_runs() -> (
    None
):
    target = near_bigram()
    engine = sc.Engine(target, BigramDraft(target), max_model_len=12, num_speculative_tokens=3)
    for prompt, one in zip(
        PROMPTS,
        engine.generate(PROMPTS, sc.SamplingParams(**GREEDY)),
        strict=True,
    ):
        assert one.tokens == greedy(target, prompt, 12 - len(prompt))
        assert one.finish_reason == "length"
    _ = engine.stats
    for bad in ([1] * 12, [], [1, 23], [1, -1], ["a"]):
        with pytest.raises(sc.BatchError, match="prompt 1"):
            engine.generate([[1], bad])  # type: ignore[list-item]
    assert engine.stats["tokens"] == 0
    assert engine.generate([]) == []


@pytest.mark.parametrize(
    "asked",
    [
        {"n": 0}, {"n": True}, {"n": 1.0}, {"temperature": -0.1}, {"temperature": math.nan},
        {"temperature": math.inf}, {"temperature": 1e-9}, {"temperature": True}, {"temperature": "1"},
        {"top_k": -1}, {"top_k": 2.0}, {"top_p": 0.0}, {"top_p": 1.1}, {"top_p": math.nan},
        {"max_tokens": 0}, {"max_tokens": None}, {"stop_token_ids": 3}, {"stop_token_ids": (-1,)},
        {"stop_token_ids": (True,)}, {"stop": ("",)}, {"stop": (3,)}, {"stop": 3}, {"seed": -1},
        {"seed": True}, {"seed": 0.5}, {"ignore_eos": 1},
    ],
    ids=str,
)  # fmt: skip
def test_sampling_parameters_out_of_range_are_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(sc.ConfigError, match=next(iter(asked))):
        sc.SamplingParams(**asked)


def test_engine_arguments_out_of_range_are_refused() -> None:
    target = tiny_llama()
    refused: list[dict[str, Any]] = [
        {"max_num_seqs": 0}, {"max_num_seqs": True}, {"max_model_len": 1}, {"max_model_len": 513},
        {"num_speculative_tokens": 1}, {"num_speculative_tokens": -1}, {"seed": -1},
    ]  # fmt: skip
    for asked in refused:
        with pytest.raises(sc.ConfigError, match=next(iter(asked))):
            sc.Engine(target, **asked)
    with pytest.raises(sc.ConfigError, match="get_decoder"):
        sc.Engine(nn.Linear(2, 2))


def test_target_with_capped_scores_is_refused() -> None:
    config = Gemma2Config(
        num_hidden_layers=2, hidden_size=32, intermediate_size=40, vocab_size=31, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, final_logit_softcapping=None,
    )  # fmt: skip
    engine = sc.Engine(Gemma2ForCausalLM(config))
    with pytest.raises(sc.ConfigError, match="caps its attention scores"):
        engine.generate([[1, 2]])


def perturbed(module: nn.Module, seed: int = 9) -> dict[str, torch.Tensor]:
    """New values for every name of the checkpoint, tied names alike."""
    torch.manual_seed(seed)
    fresh = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return fresh.state_dict()


@pytest.mark.parametrize("tied", [False, True])
def test_weights_after_an_update_are_the_senders_bit_for_bit(tied: bool) -> None:
    target = tiny_llama(vocab=23, tied=tied)
    draft = eagle(target)
    engine = sc.Engine(target, draft, num_speculative_tokens=3)
    params = sc.SamplingParams(max_tokens=9, **GREEDY)
    assert {one.weight_version for one in engine.generate(PROMPTS, params)} == {0}
    new, drafts = perturbed(target), perturbed(draft)
    engine.update_weights("policy", iter(new.items()), 5)
    engine.update_weights("draft", drafts.items(), 6)
    target.load_state_dict(new)
    served: Any = engine._target.model
    assert all(torch.equal(value, new[name]) for name, value in served.state_dict().items())
    assert (served.lm_head.weight is served.model.embed_tokens.weight) == tied
    second: Any = engine._draft.model  # type: ignore[union-attr]
    assert all(torch.equal(value, drafts[name]) for name, value in second.state_dict().items())
    after = engine.generate(PROMPTS, params)
    assert {one.weight_version for one in after} == {5}
    assert [one.tokens for one in after] == [greedy(target, prompt, 9) for prompt in PROMPTS]
    for value in new.values():
        value.zero_()
    assert engine.generate(PROMPTS, params) == after, "the engine holds its own copy"


def test_bad_update_raises_and_changes_nothing() -> None:
    target = tiny_llama(vocab=23, tied=True)
    engine = sc.Engine(target, eagle(target))
    new = perturbed(target)
    first = next(iter(new))
    bad: list[tuple[str, list[tuple[str, Any]]]] = [
        ("is incomplete", list(new.items())[1:-1]),
        ("did you mean", [*new.items(), ("model.norm.weigth", new["model.norm.weight"])]),
        ("came twice", [*new.items(), (first, new[first])]),
        ("has shape", [(name, value[:1]) for name, value in new.items()]),
        ("one tied parameter", [(name, value + ("lm" in name)) for name, value in new.items()]),
        ("must be a tensor", [(name, 1.0) for name in new]),
        ("expected torch.float64", [(name, value.long()) for name, value in new.items()]),
    ]
    before = {name: value.clone() for name, value in engine._target.model.state_dict().items()}
    for message, update in bad:
        with pytest.raises(sc.ConfigError, match=message):
            engine.update_weights("policy", update, 1)
    assert engine.weight_version == 0
    served = engine._target.model.state_dict()
    assert all(torch.equal(value, before[name]) for name, value in served.items())
    for which in ("target", "policy "):
        with pytest.raises(sc.ConfigError, match="'policy' or 'draft'"):
            engine.update_weights(which, new.items(), 1)
    with pytest.raises(sc.ConfigError, match="version"):
        engine.update_weights("policy", new.items(), True)


def test_alias_of_a_tied_parameter_may_be_left_out_and_types_are_cast() -> None:
    target = tiny_llama(vocab=23, tied=True)
    engine = sc.Engine(target)
    new = {name: value.float() for name, value in perturbed(target).items()}
    del new["lm_head.weight"]
    engine.update_weights("policy", new.items(), 1)
    served = engine._target.model.state_dict()
    assert all(torch.equal(served[name], value.double()) for name, value in new.items())


def test_engine_of_parameters_on_meta_waits_for_complete_weights() -> None:
    target = near_bigram()
    draft = BigramDraft(target)
    weights = [{k: v.clone() for k, v in m.state_dict().items()} for m in (target, draft)]
    expected = greedy(target, PROMPTS[0], 7)
    for module in (target, draft):
        for owner in module.modules():
            for name, parameter in list(owner.named_parameters(recurse=False)):
                setattr(owner, name, nn.Parameter(torch.empty_like(parameter, device="meta")))
    engine = sc.Engine(target, draft, num_speculative_tokens=2)
    params = sc.SamplingParams(max_tokens=7, **GREEDY)
    for which, state in zip(("policy", "draft"), weights, strict=True):
        with pytest.raises(sc.ConfigError, match=f"no complete {which} weights"):
            engine.generate(PROMPTS, params)
        engine.update_weights(which, state.items(), 1)
    assert engine.generate(PROMPTS[:1], params)[0].tokens == expected


def test_weights_of_a_bound_model_reach_the_engine() -> None:
    target = tiny_llama(vocab=23)
    draft = eagle(target)
    engine = sc.Engine(target, draft)
    model = sc.parallelize(target, draft, sc.Plan(verify=False))
    model.step(packed_batch((9, 12), vocab=23), lambda rows: -(rows.logprobs * rows.mask).sum())
    with torch.no_grad():
        for module in (target, draft):
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.sub_(0.1 * parameter.grad)
    for version, which in enumerate(("policy", "draft"), 1):
        engine.update_weights(which, model.export_weights(which), version)
    model.close()
    for served, module in ((engine._target.model, target), (engine._draft.model, draft)):  # type: ignore[union-attr]
        own = served.state_dict()
        assert all(torch.equal(own[name], value) for name, value in module.state_dict().items())
    assert engine.weight_version == 1


@pytest.mark.parametrize("which", ["policy", "draft"])
def test_logits_that_are_not_finite_name_the_request_and_the_next_update_heals(which: str) -> None:
    target = near_bigram()
    draft = eagle(target)
    engine = sc.Engine(target, draft, num_speculative_tokens=2)
    module = {"policy": target, "draft": draft}[which]
    good = {name: value.clone() for name, value in module.state_dict().items()}
    broken = {name: torch.full_like(value, math.nan) for name, value in good.items()}
    params = sc.SamplingParams(max_tokens=6, seed=1, stop_token_ids=())
    before = engine.generate(PROMPTS, params)
    engine.update_weights(which, broken.items(), 1)
    word = {"policy": "target", "draft": "draft"}[which]
    with pytest.raises(
        sc.SpecCompileError, match=rf"prompt 0, sample 0, position \d+: the {word}'s logits"
    ):
        engine.generate(PROMPTS, params)
    engine.update_weights(which, good.items(), 0)
    assert engine.generate(PROMPTS, params) == before


def test_dropout_is_off_and_nothing_of_inference_mode_leaks() -> None:
    target = near_bigram()
    for layer in target.model.layers:
        layer.self_attn.attention_dropout = 0.5
    engine = sc.Engine(target.train(), max_num_seqs=4)
    params = sc.SamplingParams(max_tokens=6, **GREEDY)
    assert engine.generate(PROMPTS, params) == engine.generate(PROMPTS, params)
    assert not torch.is_inference_mode_enabled()
    assert not any(p.is_inference() for p in engine._target.model.parameters())


def test_bfloat16_models_are_served() -> None:
    target = near_bigram(dtype=torch.bfloat16)
    engine = sc.Engine(target, eagle(target), num_speculative_tokens=2)
    rollouts = engine.generate(PROMPTS, sc.SamplingParams(max_tokens=8, stop_token_ids=()))
    assert all(len(one.tokens) == 8 and max(one.logprobs) <= 0 for one in rollouts)
