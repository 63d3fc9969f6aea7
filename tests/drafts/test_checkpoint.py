from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from spec_compile.drafts import Eagle3
from spec_compile.errors import ConfigError
from tests.models import randomise, tiny_llama, tiny_qwen3


def edit_config(path: Path, **changes: Any) -> None:
    file = path / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def rename(path: Path, old: str, new: str) -> None:
    file = path / "model.safetensors"
    save_file({name.replace(old, new): t for name, t in load_file(file).items()}, file)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"qk_norm": True, "attention_bias": True, "fc_norm": True},
        {"norm_output": True, "norm_before_fc": True, "taps": (3, 0), "loss_decay": 0.5},
    ],
    ids=["defaults", "qwen", "3.1"],
)
def test_saved_draft_comes_back_whole(tmp_path: Path, options: dict[str, Any]) -> None:
    draft = randomise(Eagle3.from_target(tiny_llama(), 3, **options), seed=5)
    draft.save(tmp_path)
    back = Eagle3.from_pretrained(tmp_path)
    assert back.config == draft.config
    state = back.state_dict()
    for name, tensor in draft.state_dict().items():
        assert state[name].dtype == tensor.dtype
        assert torch.equal(state[name], tensor), name


def test_configuration_has_the_keys_that_engines_read(tmp_path: Path) -> None:
    Eagle3.from_target(tiny_qwen3(), 3).to(torch.bfloat16).save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "vocab_size": 61,
        "draft_vocab_size": 61,
        "torch_dtype": "bfloat16",
        "eagle_aux_hidden_state_layer_ids": [2, 2, 1],
        "num_aux_hidden_states": 3,
        "target_hidden_size": 32,
        "norm_before_residual": False,
        "tie_word_embeddings": False,
    }
    assert {key: config[key] for key in expected} == expected


def test_engine_names_and_vocabulary_maps_are_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    draft = Eagle3.from_target(tiny_qwen3())
    draft.save(tmp_path)
    rename(tmp_path, "midlayer.", "layers.0.")
    file = tmp_path / "model.safetensors"
    extra = {
        "d2t": torch.zeros(61, dtype=torch.int64),
        "t2d": torch.ones(61, dtype=torch.bool),
        "embed_tokens.weight": torch.zeros(61, 32),
    }
    save_file({**load_file(file), **extra}, file)
    with caplog.at_level(logging.WARNING, "spec_compile"):
        back = Eagle3.from_pretrained(tmp_path)
    assert torch.equal(back.midlayer.mlp.up_proj.weight, draft.midlayer.mlp.up_proj.weight)
    assert "embed_tokens" in caplog.text


def test_reduced_vocabulary_is_refused(tmp_path: Path) -> None:
    Eagle3.from_target(tiny_qwen3()).save(tmp_path)
    edit_config(tmp_path, draft_vocab_size=20)
    with pytest.raises(ConfigError, match="draft_vocab_size=20"):
        Eagle3.from_pretrained(tmp_path)


def test_taps_missing_from_the_file_are_asked_for_and_taken(tmp_path: Path) -> None:
    Eagle3.from_target(tiny_qwen3()).save(tmp_path)
    edit_config(tmp_path, eagle_aux_hidden_state_layer_ids=...)
    with pytest.raises(ConfigError, match="lacks taps"):
        Eagle3.from_pretrained(tmp_path)
    assert Eagle3.from_pretrained(tmp_path, taps=(0, 1, 2)).taps == (0, 1, 2)


def test_misfitting_weights_are_named(tmp_path: Path) -> None:
    Eagle3.from_target(tiny_qwen3()).save(tmp_path)
    rename(tmp_path, "mlp.up_proj", "mlp.sideways_proj")
    with pytest.raises(ConfigError, match="up_proj"):
        Eagle3.from_pretrained(tmp_path)


def test_folder_without_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        Eagle3.from_pretrained(tmp_path)
    Eagle3.from_target(tiny_qwen3()).save(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="safetensors"):
        Eagle3.from_pretrained(tmp_path)
