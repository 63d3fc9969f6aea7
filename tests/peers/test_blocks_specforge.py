"""Our DFlash and DSpark against those of SpecForge: same weights, row and anchors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spec_compile.contract import DraftInputs, DraftOutput
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
)

pytestmark = pytest.mark.peers

BLOCK, LAYERS, ANCHORS, SEED, LENGTH = 4, 2, 6, 11, 29
BLOCKS = {**SIZES, "num_hidden_layers": LAYERS, "block_size": BLOCK, "mask_token_id": VOCAB - 1}


def layer_config(**dflash: Any) -> Any:
    from transformers import Qwen3Config

    config = Qwen3Config(
        hidden_size=DIM, intermediate_size=SIZES["intermediate_size"], num_hidden_layers=LAYERS,
        num_attention_heads=SIZES["num_attention_heads"], head_dim=SIZES["head_dim"], vocab_size=VOCAB,
        num_key_value_heads=SIZES["num_key_value_heads"], rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    config.block_size, config.num_target_layers = BLOCK, 4
    config.dflash_config = {
        "target_layer_ids": [0, 1, 2],
        "mask_token_id": VOCAB - 1,
        **dflash,
    }
    return config


def head(inputs: DraftInputs) -> nn.Linear:
    linear = nn.Linear(DIM, VOCAB, bias=False, dtype=torch.float64)
    linear.weight = nn.Parameter(inputs.teacher.weight, requires_grad=False)
    return linear


def wrapper(kind: Any, model: nn.Module, draft: nn.Module, inputs: DraftInputs) -> Any:
    """Their training wrapper around a model with our weights."""
    model = model.double()
    model.load_state_dict(draft.state_dict())
    table = nn.Embedding.from_pretrained(embedding_table(inputs))
    return kind(
        model, head(inputs), table, VOCAB - 1, block_size=BLOCK, attention_backend="sdpa",
        num_anchors=ANCHORS, loss_decay_gamma=4.0,
    )  # fmt: skip


def batch_of(inputs: DraftInputs) -> dict[str, Tensor]:
    return {
        "input_ids": inputs.tokens[None],
        "hidden_states": inputs.features[None],
        "loss_mask": inputs.loss_mask.double()[None],
    }


def with_their_anchors(theirs: Any, inputs: DraftInputs) -> None:
    """Give ``inputs`` the anchors that their next forward draws after the same seed."""
    torch.manual_seed(SEED)
    mask = batch_of(inputs)["loss_mask"]
    anchors, used = theirs._sample_anchor_positions(LENGTH, mask, mask.device)
    assert used.all()
    inputs.anchors = anchors[0]


def assert_equal(ours: tuple[nn.Module, DraftOutput], theirs: Any, loss: Tensor) -> None:
    draft, output = ours
    own = output.loss_sum / output.count
    own.backward()
    loss.backward()
    assert float(own.detach()) == pytest.approx(float(loss.detach()), abs=1e-4)
    assert_close_by_name(gradients_of(draft), gradients_of(theirs.draft_model))


def test_dflash_equals_that_of_specforge() -> None:
    from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
    from specforge.modeling.draft.dflash import DFlashDraftModel

    inputs = draft_inputs((LENGTH,), prompt=1)
    draft = randomise(DFlash(DFlashConfig(**BLOCKS), dtype=torch.float64), seed=1)
    theirs = wrapper(OnlineDFlashModel, DFlashDraftModel(layer_config()), draft, inputs)
    with_their_anchors(theirs, inputs)
    normed, their_normed = record_outputs(draft.norm), record_outputs(theirs.draft_model.norm)
    output = draft(inputs)
    torch.manual_seed(SEED)
    loss, _, _ = theirs(**batch_of(inputs))
    torch.testing.assert_close(normed[0].reshape(-1, DIM), their_normed[0][0], rtol=1e-4, atol=1e-4)
    assert_equal((draft, output), theirs, loss)


def test_dspark_equals_that_of_specforge() -> None:
    from specforge.algorithms.common.dflash_family_model import OnlineDSparkModel
    from specforge.modeling.draft.dspark import DSparkDraftModel

    inputs = draft_inputs((LENGTH,), prompt=1)
    draft = randomise(DSpark(DSparkConfig(**BLOCKS, markov_rank=6), dtype=torch.float64), seed=1)
    config = layer_config(
        markov_rank=6, markov_head_type="vanilla", enable_confidence_head=True,
        confidence_head_with_markov=True, projector_type="dspark",
    )  # fmt: skip
    theirs = wrapper(OnlineDSparkModel, DSparkDraftModel(config), draft, inputs)
    with_their_anchors(theirs, inputs)
    output = draft(inputs)
    torch.manual_seed(SEED)
    loss, _, metrics = theirs(
        **batch_of(inputs), target_last_hidden_states=inputs.teacher.hidden[None]
    )
    for name, ratio in (("ce", "ce_loss"), ("l1", "l1_loss"), ("confidence", "confidence_loss")):
        total, count = metrics["ratio_metrics"][ratio]
        assert float(output.stats[name] / output.count) == pytest.approx(
            float(total / count), abs=1e-4
        )
    assert_equal((draft, output), theirs, loss)
