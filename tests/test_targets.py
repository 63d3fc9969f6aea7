"""Targets that differ from a dense Llama: mixtures of experts, sinks and windows, other norms, linear attention."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

import spec_compile as sc
from spec_compile import Plan
from spec_compile.errors import CaptureError, ConfigError, PlanError

from .models import FAMILIES, HYBRIDS, tiny_of_family
from .step_cases import check_step

TOLERANCE = {
    "gemma": 2e-6,
    "gemma2": 2e-6,
    "gemma3_tied": 2e-6,
    "qwen3_next": 1e-5,
    "qwen3_5": 1e-5,
}
"""Transformers computes Gemma's norms and the delta rule in fp32."""
GRID = [(cp, pp) for pp in (1, 2) for cp in (1, 2)]


def test_step_of_a_mixture_of_experts_equals_the_dense_step() -> None:
    check_step("qwen3_moe", "eagle3", Plan(cp=2, pp=2, micro_batches=2))


@pytest.mark.slow
@pytest.mark.parametrize(("cp", "pp"), GRID)
@pytest.mark.parametrize("target", ["qwen3_moe", "gpt_oss"])
def test_step_of_experts_equals_the_dense_step_on_any_grid(target: str, cp: int, pp: int) -> None:
    if (target, cp, pp) == ("qwen3_moe", 2, 2):
        pytest.skip("a quick test does this one")
    check_step(target, "eagle3", Plan(cp=cp, pp=pp, micro_batches=2), tolerance=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["mixtral", "gpt_oss_tied", "gemma", "gemma2", "gemma3_tied"])
def test_step_equals_the_dense_step(target: str) -> None:
    tolerance = TOLERANCE.get(target, 1e-8)
    check_step(target, "gated", Plan(cp=2, pp=2, micro_batches=2), tolerance=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("target", HYBRIDS)
def test_step_of_a_hybrid_target_equals_the_dense_step(target: str, pp: int) -> None:
    check_step(target, "eagle3", Plan(pp=pp, micro_batches=2), tolerance=TOLERANCE[target])


@pytest.mark.slow
@pytest.mark.parametrize("target", HYBRIDS)
def test_hybrid_target_is_refused_with_cp_naming_the_layer(target: str) -> None:
    model = tiny_of_family(target)
    with pytest.raises(PlanError, match=r"linear attention of target layer 0.*cp=1"):
        sc.lower(model, None, Plan(cp=2))


@pytest.mark.slow
@pytest.mark.parametrize("target", FAMILIES)
def test_target_is_lowered_on_the_meta_device(target: str) -> None:
    model = tiny_of_family(target, device="meta", dtype=torch.bfloat16)
    draft = sc.drafts.Eagle3.from_target(model, 2)
    lowered = sc.lower(model, draft, Plan(cp=1 if target in HYBRIDS else 2, pp=2))
    assert set(lowered.graphs) == {"stage0", "stage1"}


@pytest.mark.slow
def test_lowering_leaves_the_experts_implementation_as_it_was() -> None:
    model = tiny_of_family("mixtral")
    sc.lower(model, None, Plan(cp=2, verify=False))
    assert model.config._experts_implementation == "eager"
    ids = torch.arange(7)[None]
    assert bool(model(input_ids=ids).logits.isfinite().all())


def test_a_window_that_only_the_mask_knows_is_refused() -> None:
    config = Qwen2MoeConfig(
        num_hidden_layers=2, hidden_size=16, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=20, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=4,
        shared_expert_intermediate_size=4, use_sliding_window=True, sliding_window=40,
        max_window_layers=2,
    )  # fmt: skip
    model = Qwen2MoeForCausalLM(config)
    with pytest.raises(CaptureError, match=r"mask of 40 keys .* sliding_window=None"):
        sc.lower(model, None, Plan(cp=2))
    engine = sc.Engine(model, max_num_seqs=1, max_model_len=8)
    with pytest.raises(ConfigError, match=r"mask of 40 keys"):
        engine.generate([[1, 2]], sc.SamplingParams(max_tokens=2))
