"""Our EAGLE-3 against the one of speculators: same weights, same rows."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from spec_compile.contract import DraftInputs
from spec_compile.drafts import Eagle3, Eagle3Config
from tests.models import randomise
from tests.peers.rows import (
    DIM,
    SIZES,
    VOCAB,
    assert_close_by_name,
    documents,
    draft_inputs,
    embedding_table,
    gradients_of,
    record_outputs,
    unit_teacher,
)

os.environ.setdefault("SPECULATORS_DISABLE_COMPILE", "1")
pytestmark = pytest.mark.peers

STEPS = 4
LENGTHS = (9, 21, 7)
SWITCHES: dict[str, Any] = {
    "loss": "kl", "loss_mask_of": "embedded", "loss_decay": 1.0, "skip_unknown": False,
}  # fmt: skip
OPTIONS: list[dict[str, Any]] = [
    {},
    {"norm_before_residual": True, "norm_before_fc": True},
    {"fc_norm": True, "norm_output": True},
    {"qk_norm": True},
    {"draft_vocab_size": 23},
    {"num_hidden_layers": 3, "norm_before_residual": True},
    {
        "num_hidden_layers": 2, "qk_norm": True, "sliding_window": 4,
        "layer_types": ("full_attention", "sliding_attention"),
    },
]  # fmt: skip
KNOWN = torch.arange(5, 5 + 2 * 23, 2)
"""Ids of the target that a reduced vocabulary has."""


def theirs_like(draft: Eagle3, inputs: DraftInputs) -> Any:
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from transformers import LlamaConfig, Qwen3Config

    ours = draft.config
    family = Qwen3Config if ours.qk_norm else LlamaConfig
    sliding: dict[str, Any] = {}
    if ours.layer_types is not None:
        sliding = {"layer_types": list(ours.layer_types), "sliding_window": ours.sliding_window}
        sliding["use_sliding_window"] = True
    layer = family(
        hidden_size=DIM, intermediate_size=ours.intermediate_size,
        num_hidden_layers=ours.num_hidden_layers, **sliding,
        num_attention_heads=ours.num_attention_heads, num_key_value_heads=ours.num_key_value_heads,
        head_dim=ours.head_dim, vocab_size=VOCAB, rms_norm_eps=ours.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": ours.rope_theta}, attention_bias=False,
    )  # fmt: skip
    layer._attn_implementation = "eager"
    names = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    options = {name: getattr(ours, name) for name in names}
    model = Eagle3DraftModel(
        Eagle3SpeculatorConfig(
            transformer_layer_config=layer, draft_vocab_size=ours.draft_vocab_size,
            eagle_aux_hidden_state_layer_ids=[0, 1, 2], **options,
        )
    ).double()  # fmt: skip
    weights = {n.replace("midlayer", "layers.0"): p for n, p in draft.state_dict().items()}
    weights["embed_tokens.weight"] = embedding_table(inputs)
    head = inputs.teacher.weight
    weights["verifier_lm_head.weight"] = head[KNOWN] if "d2t" in weights else head
    weights["verifier_norm.weight"] = torch.ones(DIM, dtype=torch.float64)
    model.load_state_dict(weights)
    model.lm_head.weight.requires_grad_(True)
    return model


def shifted(inputs: DraftInputs) -> dict[str, Tensor]:
    """Their alignment, (token t+1, feature t, teacher t+1, mask t+1), document by document."""
    vectors = (inputs.tokens, inputs.features, inputs.teacher.hidden, inputs.loss_mask)
    rows = [
        (x[1:], f[:-1], z[1:], m[1:], p[:-1], d[1:])
        for x, f, z, m, p, d in documents(inputs, *vectors, inputs.positions, inputs.document)
    ]
    names = (
        "input_ids", "hidden_states", "verifier_last_hidden_states", "loss_mask", "position_ids", "document_ids",
    )  # fmt: skip
    return {n: torch.cat(c)[None] for n, c in zip(names, zip(*rows, strict=True), strict=True)}


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: ",".join(o) or "defaults")
def test_logits_losses_and_gradients_equal_those_of_speculators(options: dict[str, Any]) -> None:
    from speculators.losses.eager import kl_div_loss

    from spec_compile.integrations.speculators import from_speculators

    inputs = unit_teacher(draft_inputs(LENGTHS, prompt=STEPS + 2))
    config = Eagle3Config(**SIZES, ttt_length=STEPS, **SWITCHES, **options)
    known = KNOWN if "draft_vocab_size" in options else None
    draft = randomise(Eagle3(config, dtype=torch.float64, draft_vocab=known), seed=1)
    model = theirs_like(draft, inputs)

    normed = record_outputs(draft.norm)
    output = draft(inputs)
    losses = output.loss_sum / output.count
    losses.sum().backward()

    logits = record_outputs(model.lm_head)
    _, loss, metrics = model(
        **shifted(inputs), ttt_steps=STEPS, loss_config={"kl_div": (kl_div_loss, 1.0)}
    )
    loss.backward()

    kept = torch.ones(len(inputs.tokens), dtype=torch.bool)
    kept[torch.tensor(LENGTHS).cumsum(0) - 1] = False  # their rows are those with a next token
    left = inputs.positions[kept]
    lengths = torch.tensor(LENGTHS)[inputs.document[kept]]
    for step in range(STEPS):
        real = left + step + 1 < lengths  # behind a document's end they embed another's tokens
        ours = draft.lm_head(normed[step])[kept][real]
        torch.testing.assert_close(ours, logits[step][0][real], rtol=1e-4, atol=1e-4)
        their_loss = float(metrics[f"loss_{step}_sum"])
        assert float(losses[step].detach()) == pytest.approx(their_loss, abs=1e-4)
    adapted = from_speculators(model, ttt_steps=STEPS)(inputs)
    their_sum = (adapted.loss_sum / adapted.count).sum().detach()
    assert float(their_sum) == pytest.approx(float(loss.detach()), abs=1e-4)
    their_gradients = {n.replace("layers.0", "midlayer"): g for n, g in gradients_of(model).items()}
    assert_close_by_name(gradients_of(draft), their_gradients)
