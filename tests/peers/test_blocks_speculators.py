"""Our DFlash and DSpark against those of speculators: same weights, rows and anchors."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from spec_compile.contract import DraftInputs
from spec_compile.drafts import DFlash, DSpark
from spec_compile.drafts.dflash_config import DFlashConfig, DSparkConfig
from tests.models import randomise
from tests.peers.rows import (
    DIM,
    SIZES,
    VOCAB,
    assert_close_by_name,
    draft_inputs,
    embedding_table,
    gradients_of,
    record_outputs,
    unit_teacher,
)

os.environ.setdefault("SPECULATORS_DISABLE_COMPILE", "1")
pytestmark = pytest.mark.peers

BLOCK, LAYERS, ANCHORS, SEED = 4, 2, 5, 7
KNOWN = torch.arange(5, 5 + 2 * 23, 2)
"""Ids of the target that a reduced vocabulary has."""
BLOCKS = {**SIZES, "num_hidden_layers": LAYERS, "block_size": BLOCK, "mask_token_id": VOCAB - 1}


def layer_config() -> Any:
    from transformers import Qwen3Config

    config = Qwen3Config(
        hidden_size=DIM, intermediate_size=SIZES["intermediate_size"], num_hidden_layers=LAYERS,
        num_attention_heads=SIZES["num_attention_heads"], head_dim=SIZES["head_dim"], vocab_size=VOCAB,
        num_key_value_heads=SIZES["num_key_value_heads"], rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    config._attn_implementation = "eager"
    return config


def options(known: Tensor | None = None) -> dict[str, Any]:
    size = VOCAB if known is None else len(known)
    return {
        "transformer_layer_config": layer_config(), "draft_vocab_size": size, "block_size": BLOCK,
        "aux_hidden_state_layer_ids": [0, 1, 2], "mask_token_id": VOCAB - 1,
    }  # fmt: skip


def load(model: Any, draft: torch.nn.Module, inputs: DraftInputs) -> Any:
    head, ones = inputs.teacher.weight, torch.ones(DIM, dtype=torch.float64)
    reduced = model.use_draft_vocab
    frozen = {
        "lm_head.weight": head, "embed_tokens.weight": embedding_table(inputs),
        "verifier_lm_head.weight": head[KNOWN] if reduced else head, "verifier_norm.weight": ones,
    }  # fmt: skip
    model = model.double()
    model.load_state_dict(frozen | draft.state_dict() if reduced else draft.state_dict() | frozen)
    model.lm_head.weight.requires_grad_(reduced)
    return model


def run(model: Any, inputs: DraftInputs, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Their loss, and the logits of all blocks, at the anchors that ``inputs`` has."""
    logits = record_outputs(model.lm_head)
    torch.manual_seed(SEED)
    _, loss, _ = model(
        hidden_states=inputs.features[None],
        input_ids=inputs.tokens[None],
        loss_mask=inputs.loss_mask[None],
        verifier_last_hidden_states=inputs.teacher.hidden[None],
        document_ids=inputs.document[None],
        position_ids=inputs.positions[None],
        max_anchors=ANCHORS,
        **kwargs,
    )
    loss.backward()
    return loss.detach(), logits[0][0]


def their_anchors(inputs: DraftInputs) -> Tensor:
    """The anchors that `run` will draw; all used."""
    from speculators.models.dflash.utils import select_anchors

    torch.manual_seed(SEED)
    anchors: Tensor
    anchors, used = select_anchors(inputs.loss_mask[None], ANCHORS, BLOCK)
    assert used.all()
    return anchors


@pytest.mark.parametrize("known", [None, KNOWN], ids=["whole vocabulary", "reduced"])
@pytest.mark.parametrize("lengths", [(23,), (12, 9, 19)], ids=["one document", "packed"])
def test_dflash_equals_that_of_speculators(lengths: tuple[int, ...], known: Tensor | None) -> None:
    from speculators.losses.eager import kl_div_loss
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig

    from spec_compile.integrations.speculators import from_speculators

    inputs = unit_teacher(draft_inputs(lengths, prompt=BLOCK))
    inputs.anchors = their_anchors(inputs)
    size = None if known is None else len(known)
    config = DFlashConfig(
        **BLOCKS, loss_type="kl", loss_mean_over="valid", draft_vocab_size=size, skip_unknown=False
    )
    draft = randomise(DFlash(config, dtype=torch.float64, draft_vocab=known), seed=1)
    model = load(DFlashDraftModel(DFlashSpeculatorConfig(**options(known))), draft, inputs)

    normed = record_outputs(draft.norm)
    output = draft(inputs)
    loss = output.loss_sum / output.count
    loss.backward()
    their_loss, their_logits = run(model, inputs, loss_config={"kl_div": (kl_div_loss, 1.0)})

    ours = normed[0].reshape(-1, DIM) @ draft.head(inputs, torch.float64).T
    torch.testing.assert_close(ours, their_logits, rtol=1e-4, atol=1e-4)
    assert float(loss.detach()) == pytest.approx(float(their_loss), abs=1e-4)
    assert_close_by_name(gradients_of(draft), gradients_of(model))
    adapted = from_speculators(model)(inputs)
    value = float((adapted.loss_sum / adapted.count).detach())
    assert value == pytest.approx(float(their_loss), abs=1e-4)


@pytest.mark.parametrize("known", [None, KNOWN], ids=["whole vocabulary", "reduced"])
def test_dspark_equals_that_of_speculators(known: Tensor | None) -> None:
    """Where every token counts: they mask a slot by the token it reads, and keep slots behind a gap."""
    from speculators.losses.eager import tv_loss
    from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig

    from spec_compile.integrations.speculators import from_speculators

    inputs = unit_teacher(draft_inputs((31,), prompt=1))
    inputs.loss_mask[1:] = True
    inputs.anchors = their_anchors(inputs)
    config = DSparkConfig(
        **BLOCKS, markov_rank=6, ce_weight=0.0, l1_weight=0.45, loss_mean_over="valid",
        draft_vocab_size=None if known is None else len(known), teacher_law="draft",
    )  # fmt: skip
    draft = randomise(DSpark(config, dtype=torch.float64, draft_vocab=known), seed=1)
    their_config = DSparkSpeculatorConfig(**options(known), markov_rank=6, sample_from_anchor=True)
    model = load(DSparkDraftModel(their_config), draft, inputs)

    normed = record_outputs(draft.norm)
    output = draft(inputs)
    loss = output.loss_sum / output.count
    loss.backward()
    terms = {"loss_config": {"tv": (tv_loss, 0.9)}, "tv_loss_fn": tv_loss}
    their_loss, their_logits = run(model, inputs, **terms)

    ours = normed[0].reshape(-1, DIM) @ draft.head(inputs, torch.float64).T
    torch.testing.assert_close(ours, their_logits, rtol=1e-4, atol=1e-4)
    assert float(loss.detach()) == pytest.approx(float(their_loss), abs=1e-4)
    assert_close_by_name(gradients_of(draft), gradients_of(model))
    adapted = from_speculators(model, l1_weight=0.45)(inputs)
    value = float((adapted.loss_sum / adapted.count).detach())
    assert value == pytest.approx(float(their_loss), abs=1e-4)
