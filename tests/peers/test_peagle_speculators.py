"""Our P-EAGLE and the adapter of speculators' against their own forward: same weights, rows and elements."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from spec_compile.contract import DraftInputs
from spec_compile.drafts import PEagle
from spec_compile.drafts.peagle import PEagleConfig
from spec_compile.errors import ConfigError
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

DEPTHS, LAYERS, PROMPT = 4, 2, 2
LENGTHS = (9, 21, 7)
ANCHORS = (0, 3, 4, 9, 12, 20, 27, 31, 34)
KNOWN = torch.arange(5, 5 + 2 * 23, 2)
"""Ids of the target that a reduced vocabulary has."""
OPTIONS: list[dict[str, Any]] = [
    {},
    {"norm_before_residual": True},
    {"qk_norm": True},
    {"draft_vocab_size": 23},
]


def theirs(ours: PEagleConfig, **layer_options: Any) -> Any:
    from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig
    from transformers import LlamaConfig, Qwen3Config

    family = Qwen3Config if ours.qk_norm else LlamaConfig
    layer = family(
        hidden_size=DIM, intermediate_size=ours.intermediate_size, num_hidden_layers=LAYERS,
        num_attention_heads=ours.num_attention_heads, num_key_value_heads=ours.num_key_value_heads,
        head_dim=ours.head_dim, vocab_size=VOCAB, rms_norm_eps=ours.rms_norm_eps, attention_bias=False,
        rope_parameters={"rope_type": "default", "rope_theta": ours.rope_theta}, **layer_options,
    )  # fmt: skip
    layer._attn_implementation = "sdpa"
    config = PEagleSpeculatorConfig(
        transformer_layer_config=layer, draft_vocab_size=ours.draft_vocab_size,
        eagle_aux_hidden_state_layer_ids=[0, 1, 2], mask_token_id=ours.mask_token_id,
        norm_before_residual=ours.norm_before_residual,
    )  # fmt: skip
    return PEagleDraftModel(config).double()


def load(model: Any, draft: PEagle, inputs: DraftInputs) -> Any:
    head = inputs.teacher.weight
    frozen = {
        "embed_tokens.weight": embedding_table(inputs),
        "verifier_lm_head.weight": head[KNOWN] if model.use_draft_vocab else head,
        "verifier_norm.weight": torch.ones(DIM, dtype=torch.float64),
    }
    model.load_state_dict(draft.state_dict() | frozen)
    model.lm_head.weight.requires_grad_(True)
    return model


def shifted(inputs: DraftInputs) -> dict[str, Tensor]:
    """Their alignment, (token t+1, feature t, teacher t+1, mask t+1), document by document."""
    vectors = (inputs.tokens, inputs.features, inputs.teacher.hidden, inputs.loss_mask)
    rows = [
        (x[1:], f[:-1], z[1:], m[1:], d[1:])
        for x, f, z, m, d in documents(inputs, *vectors, inputs.document)
    ]
    names = (
        "input_ids",
        "hidden_states",
        "verifier_last_hidden_states",
        "loss_mask",
        "document_ids",
    )
    return {n: torch.cat(c)[None] for n, c in zip(names, zip(*rows, strict=True), strict=True)}


def elements(rows: dict[str, Tensor], chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Every element that their sampler can draw: depth 0 at all rows, later ones where the chain counts."""
    counted, document = rows["loss_mask"][0], rows["document_ids"][0]
    first, depth = [torch.arange(len(counted))], [torch.zeros(len(counted), dtype=torch.long)]
    for k in range(1, DEPTHS):
        at = [
            a
            for a in chosen.tolist()
            if a + k < len(counted)
            and document[a] == document[a + k]
            and counted[a + 1 : a + k + 1].all()
        ]
        first.append(torch.tensor(at))
        depth.append(torch.full((len(at),), k))
    return torch.cat(first), torch.cat(depth)


def kept_rows() -> Tensor:
    """The rows that theirs have, of the packed row."""
    kept = torch.ones(sum(LENGTHS), dtype=torch.bool)
    kept[torch.tensor(LENGTHS).cumsum(0) - 1] = False
    return kept.nonzero()[:, 0]


def run_theirs(
    model: Any, inputs: DraftInputs, anchors: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Loss, logits and elements (rows of the packed row, and depths) of their forward."""
    from speculators.losses.eager import kl_div_loss
    from speculators.models.peagle import core

    rows, kept = shifted(inputs), kept_rows()
    every = torch.arange(len(kept))
    drawn = elements(rows, every if anchors is None else every[torch.isin(kept, anchors)])
    monkeypatch.setattr(core, "generate_cod_sample_indices", lambda **_: drawn)
    logits = record_outputs(model.lm_head)
    _, loss, _ = model(**rows, num_depths=DEPTHS, loss_config={"kl_div": (kl_div_loss, 1.0)})
    loss.backward()
    return loss.detach(), logits[0][0], (kept[drawn[0]], drawn[1])


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: ",".join(o) or "defaults")
@pytest.mark.parametrize("anchors", [None, ANCHORS], ids=["all rows", "at anchors"])
def test_logits_loss_and_gradients_equal_those_of_speculators(
    options: dict[str, Any], anchors: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from spec_compile.integrations.speculators import from_speculators

    inputs = unit_teacher(draft_inputs(LENGTHS, prompt=PROMPT))
    config = PEagleConfig(
        **SIZES, num_hidden_layers=LAYERS, num_depths=DEPTHS, mask_token_id=VOCAB - 1, **options
    )
    known = KNOWN if "draft_vocab_size" in options else None
    draft = randomise(PEagle(config, dtype=torch.float64, draft_vocab=known), seed=1)
    model = load(theirs(draft.config), draft, inputs)
    if anchors is not None:
        inputs.anchors = torch.tensor([*anchors, -1, -1])
    chosen = None if anchors is None else torch.tensor(anchors)
    their_loss, their_logits, (rows, depths) = run_theirs(model, inputs, chosen, monkeypatch)
    their_gradients = gradients_of(model)

    adapted = from_speculators(
        model, num_depths=DEPTHS, anchors_per_document=None if anchors is None else 4
    )
    model.zero_grad()
    output = adapted(inputs)
    loss = output.loss_sum / output.count
    loss.backward()
    assert float(loss.detach()) == pytest.approx(float(their_loss), abs=1e-4)
    assert_close_by_name(gradients_of(model), their_gradients)
    if anchors is None:
        normed = record_outputs(draft.norm)
        draft(inputs)
        ours = draft.lm_head(torch.stack(normed))[depths, rows]
        torch.testing.assert_close(ours, their_logits, rtol=1e-4, atol=1e-4)


def test_sliding_windows_are_those_of_speculators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorter by one at each depth; a window that no depth uses up."""
    from spec_compile.integrations.speculators import from_speculators

    inputs = unit_teacher(draft_inputs(LENGTHS, prompt=PROMPT))
    config = PEagleConfig(
        **SIZES, num_hidden_layers=LAYERS, num_depths=DEPTHS, mask_token_id=VOCAB - 1, qk_norm=True
    )
    draft = randomise(PEagle(config, dtype=torch.float64), seed=1)
    windows = {
        "use_sliding_window": True, "sliding_window": DEPTHS + 1,
        "layer_types": ["full_attention", "sliding_attention"],
    }  # fmt: skip
    model = load(theirs(config, **windows), draft, inputs)
    their_loss, _, _ = run_theirs(model, inputs, None, monkeypatch)
    output = from_speculators(model, num_depths=DEPTHS)(inputs)
    loss = float((output.loss_sum / output.count).detach())
    assert loss == pytest.approx(float(their_loss), abs=1e-4)


def test_a_model_without_a_mask_token_is_refused() -> None:
    from spec_compile.integrations.speculators import from_speculators

    model = theirs(PEagleConfig(**SIZES, mask_token_id=VOCAB - 1))
    model.mask_token_id = None
    with pytest.raises(ConfigError, match="has no mask_token_id"):
        from_speculators(model)
