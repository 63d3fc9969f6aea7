"""Our EAGLE-3 against the one of SpecForge: same weights, same row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from spec_compile.codegen.triton_mode import is_interpreted
from spec_compile.contract import DraftInputs
from spec_compile.drafts import Eagle3, Eagle3Config
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

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(
        not is_interpreted(),
        reason="its loss is a Triton kernel: set TRITON_INTERPRET=1, as `make test-peers` does",
    ),
]

STEPS, LENGTH = 3, 23
KNOWN = torch.arange(5, 5 + 2 * 23, 2)
"""Ids of the target that a reduced vocabulary has."""
SWITCHES: dict[str, Any] = {"loss_mask_of": "previous", "loss_mean_over": "rows"}


def theirs_like(draft: Eagle3, inputs: DraftInputs) -> Any:
    from specforge.algorithms.eagle3.model import OnlineEagle3Model
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
    from transformers import LlamaConfig

    ours = draft.config
    config = LlamaConfig(
        hidden_size=DIM, intermediate_size=ours.intermediate_size, num_hidden_layers=1,
        num_attention_heads=ours.num_attention_heads, num_key_value_heads=ours.num_key_value_heads,
        head_dim=ours.head_dim, vocab_size=VOCAB, rms_norm_eps=ours.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": ours.rope_theta}, pad_token_id=0,
    )  # fmt: skip
    config.draft_vocab_size, config.fc_norm = ours.draft_vocab_size, ours.fc_norm
    config.norm_output = ours.head_norm
    model = LlamaForCausalLMEagle3(config)
    weights = draft.state_dict() | {"embed_tokens.weight": embedding_table(inputs)}
    weights = {**{name: getattr(model, name) for name in ("d2t", "t2d")}, **weights}
    model.load_state_dict(weights)
    model.embed_tokens.weight.requires_grad_(False)
    return OnlineEagle3Model(model, length=STEPS, attention_backend="sdpa")


def left(x: Tensor) -> Tensor:
    return torch.cat((x[1:], torch.zeros_like(x[:1])))[None]


@pytest.mark.parametrize(
    "options",
    [{}, {"fc_norm": True}, {"draft_vocab_size": 23}, {"head_norm": False, "draft_vocab_size": 23}],
    ids=lambda o: ",".join(o) or "defaults",
)
def test_logits_losses_and_gradients_equal_those_of_specforge(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = draft_inputs((LENGTH,), prompt=2)
    inputs.loss_mask[-1] = False
    config = Eagle3Config(**SIZES, ttt_length=STEPS, **SWITCHES, **options)
    known = KNOWN if "draft_vocab_size" in options else None
    draft = randomise(Eagle3(config, dtype=torch.float64, draft_vocab=known), seed=1)
    wrapper = theirs_like(draft, inputs)

    steps_of = draft.step
    read: list[Tensor] = []

    def heard(*args: Any) -> tuple[Tensor, Tensor]:
        state, head = steps_of(*args)
        read.append(head.detach())
        return state, head

    monkeypatch.setattr(draft, "step", heard)
    output = draft(inputs)
    assert output.count.tolist() == [LENGTH] * STEPS
    losses = output.loss_sum / output.count
    losses.sum().backward()

    logits = record_outputs(wrapper.draft_model.lm_head)
    with torch._dynamo.config.patch(disable=True):
        steps = wrapper(
            input_ids=left(inputs.tokens),
            attention_mask=torch.ones(1, LENGTH, dtype=torch.bool),
            target=left(inputs.teacher.hidden @ inputs.teacher.weight.T).float(),
            loss_mask=inputs.loss_mask.int()[None, :, None],
            hidden_states=inputs.features.float()[None],
        )[0]
    total = sum(draft.config.loss_decay**k * loss for k, loss in enumerate(steps))
    total.backward()

    for step in range(STEPS):
        ours, real = draft.lm_head(read[step]), LENGTH - step - 1
        torch.testing.assert_close(
            ours[:real].float(), logits[step][0, :real], rtol=1e-4, atol=1e-4
        )
        loss = float(losses[step].detach()) / draft.config.loss_decay**step
        assert loss == pytest.approx(float(steps[step].detach()), abs=1e-4)
    assert_close_by_name(gradients_of(draft), gradients_of(wrapper.draft_model))
