"""Checkpoints of the speculators form, read by that package: every tensor, beside a target of its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import spec_compile as sc
from spec_compile.drafts import most_frequent
from tests.models import randomise

os.environ.setdefault("SPECULATORS_DISABLE_COMPILE", "1")
pytestmark = pytest.mark.peers("speculators")
VOCAB, KEPT = 40, 17
COUNTS = torch.arange(VOCAB) % 7

DRAFTS: dict[str, Callable[[Any], Any]] = {
    "eagle3": lambda target: sc.drafts.Eagle3.from_target(target),
    "eagle3 with a vocabulary": lambda target: sc.drafts.Eagle3.from_target(
        target, draft_vocab=most_frequent(COUNTS, KEPT)
    ),
    "peagle": lambda target: sc.drafts.PEagle.from_target(target),
    "dflash": lambda target: sc.drafts.DFlash.from_target(target),
    "dspark": lambda target: sc.drafts.DSpark.from_target(target),
    "eagle3 of two layers": lambda target: sc.drafts.Eagle3.from_target(
        target, num_hidden_layers=2
    ),
    "dflash with a vocabulary": lambda target: sc.drafts.DFlash.from_target(
        target, draft_vocab=most_frequent(COUNTS, KEPT)
    ),
    "dspark with a vocabulary": lambda target: sc.drafts.DSpark.from_target(
        target, draft_vocab=most_frequent(COUNTS, KEPT)
    ),
}


def tiny_target() -> Qwen3ForCausalLM:
    config = Qwen3Config(
        hidden_size=32, intermediate_size=48, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, vocab_size=VOCAB, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config)


@pytest.mark.parametrize("name", DRAFTS)
def test_speculators_reads_every_tensor_of_a_saved_draft(name: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from speculators import SpeculatorModel

    target = tiny_target()
    target.save_pretrained(tmp_path / "target")
    draft = randomise(DRAFTS[name](target), 5)
    sc.drafts.save(
        draft,
        tmp_path / "draft",
        form="speculators",
        verifier=str(tmp_path / "target"),
        target=target,
    )
    read = SpeculatorModel.from_pretrained(str(tmp_path / "draft")).state_dict()
    written = load_file(tmp_path / "draft" / "model.safetensors")
    assert len(written) > 10
    for key, value in written.items():
        torch.testing.assert_close(read[key].to(value.dtype), value, rtol=0, atol=0, msg=key)
    unread = {key for key in read if key not in written and "verifier" not in key}
    shared = {"embed_tokens.weight", "lm_head.weight"}
    assert {key for key in unread if not key.endswith("inv_freq")} <= shared
    head = target.get_output_embeddings().weight
    if "lm_head.weight" in unread:
        torch.testing.assert_close(read["lm_head.weight"].float(), head.detach().float())
