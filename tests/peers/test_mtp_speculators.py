"""The adapter of speculators' MTP against its own forward."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from spec_compile.errors import ConfigError
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

STEPS, ROWS = 3, 23
HEADS = {name: SIZES[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")}


def mtp_model(layer: Any, steps: int) -> Any:
    """A module of theirs in fp64 with random weights."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.mtp import MTPDraftModel, MTPSpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    proposal = GreedyTokenProposalConfig(speculative_tokens=steps)
    config = MTPSpeculatorConfig(
        transformer_layer_config=layer,
        speculators_config=SpeculatorsConfig(
            algorithm="mtp", proposal_methods=[proposal], default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
    )  # fmt: skip
    return randomise(MTPDraftModel(config).double(), seed=1)


def theirs() -> Any:
    from transformers import Qwen3Config

    layer = Qwen3Config(
        hidden_size=DIM, intermediate_size=SIZES["intermediate_size"], vocab_size=VOCAB, num_hidden_layers=1,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, **HEADS,
    )  # fmt: skip
    return mtp_model(layer, STEPS)


@pytest.mark.parametrize("decay", [0.6, 1.0])
def test_losses_and_gradients_equal_those_of_speculators(decay: float) -> None:
    from speculators.models.mtp.core import compute_step_weights

    from spec_compile.integrations.speculators import from_speculators

    inputs = unit_teacher(draft_inputs((ROWS,), prompt=2))
    model = theirs()
    with torch.no_grad():
        model.embed_tokens.weight.copy_(embedding_table(inputs))
        model.lm_head.weight.copy_(inputs.teacher.weight)
    logits, loss, metrics = model(
        input_ids=inputs.tokens[None],
        hidden_states=inputs.teacher.hidden[None],
        position_ids=inputs.positions[None],
        loss_mask=inputs.loss_mask[None],
        step_weights=compute_step_weights(decay, STEPS),
    )
    loss.backward()
    their_gradients = gradients_of(model.mtp_layers[0])

    model.zero_grad()
    draft: Any = from_speculators(model, loss_decay=decay)
    outputs = record_outputs(draft.layer)
    output = draft(inputs)
    losses = output.loss_sum / output.count
    losses.sum().backward()
    rows = ROWS - STEPS - 1
    for step in range(STEPS):
        ours = outputs[step][:, :rows] @ inputs.teacher.weight.T
        torch.testing.assert_close(ours, logits[step].detach(), rtol=1e-4, atol=1e-4)
        expected = float(metrics[f"loss_step_{step}"])
        assert float(losses[step].detach()) == pytest.approx(expected, abs=1e-4)
    assert_close_by_name(gradients_of(draft.layer), their_gradients)


def test_a_layer_of_another_kind_is_refused() -> None:
    from spec_compile.integrations.speculators import from_speculators

    model = theirs()
    model.config.transformer_layer_config.model_type = "qwen3_next"
    with pytest.raises(ConfigError, match="a layer of type 'qwen3_next', expected qwen3"):
        from_speculators(model)
