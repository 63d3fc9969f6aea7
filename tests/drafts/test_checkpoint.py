from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from spec_compile.drafts import MTP, DFlash, DSpark, Eagle3, PEagle
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


def test_reduced_vocabulary_without_a_map_is_refused(tmp_path: Path) -> None:
    Eagle3.from_target(tiny_qwen3()).save(tmp_path)
    edit_config(tmp_path, draft_vocab_size=20)
    with pytest.raises(
        ConfigError, match="vocabulary of 20 of the target's 61 tokens needs its map"
    ):
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


FAMILIES: dict[str, Any] = {
    "mtp": lambda t: MTP.from_target(t, 2, num_hidden_layers=2, loss_decay=0.5),
    "peagle": lambda t: PEagle.from_target(t, 5, taps=(1, 0), norm_before_residual=True),
    "dflash": lambda t: DFlash.from_target(t, 4, num_hidden_layers=3, loss_decay_gamma=2.0),
    "dspark": lambda t: DSpark.from_target(t, 3, num_hidden_layers=2, markov_rank=5),
    "dspark without confidence": lambda t: DSpark.from_target(t, enable_confidence_head=False),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_draft_of_another_family_comes_back_whole(tmp_path: Path, family: str) -> None:
    draft = randomise(FAMILIES[family](tiny_qwen3()), seed=5)
    draft.save(tmp_path)
    back = type(draft).from_pretrained(tmp_path)
    assert back.config == draft.config
    state = back.state_dict()
    assert state.keys() == draft.state_dict().keys()
    for name, tensor in draft.state_dict().items():
        assert torch.equal(state[name], tensor), name


def test_block_drafts_write_the_keys_and_names_that_engines_read(tmp_path: Path) -> None:
    target = tiny_qwen3(layers=8)
    DFlash.from_target(target, num_hidden_layers=2).save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["dflash_config"] == {"mask_token_id": 60, "target_layer_ids": [1, 5]}
    assert (config["block_size"], config["layer_types"]) == (16, ["full_attention"] * 2)
    names = set(load_file(tmp_path / "model.safetensors"))
    assert {
        "fc.weight",
        "hidden_norm.weight",
        "norm.weight",
        "layers.1.self_attn.q_norm.weight",
    } <= names
    assert not any("embed" in name or "head" in name for name in names)

    DSpark.from_target(target, num_hidden_layers=2, markov_rank=4).save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    expected = {
        "architectures": ["Qwen3DSparkModel"],
        "target_layer_ids": [1, 5],
        "mask_token_id": 60,
        "block_size": 7,
        "markov_rank": 4,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "sample_from_anchor": True,
    }
    assert {key: config.get(key) for key in expected} == expected
    assert "dflash_config" not in config
    shapes = {n: tuple(t.shape) for n, t in load_file(tmp_path / "model.safetensors").items()}
    assert shapes["markov_head.markov_w1.weight"] == (61, 4)
    assert shapes["markov_head.markov_w2.weight"] == (61, 4)
    assert shapes["confidence_head.proj.weight"] == (1, 36)
    assert shapes["confidence_head.proj.bias"] == (1,)


def test_peagle_writes_the_keys_and_names_that_engines_read(tmp_path: Path) -> None:
    PEagle.from_target(tiny_qwen3(), taps=(2, 3, 1)).save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    # vLLM's raw loader finds no other name; the fields below tell it from an EAGLE-3 that drafts in a chain
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["parallel_drafting"] is True
    assert (config["pard_token"], config["mask_token_id"]) == (60, 60)
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 3, 1]
    shapes = {n: tuple(t.shape) for n, t in load_file(tmp_path / "model.safetensors").items()}
    assert shapes["mask_hidden"] == (1, 1, 96)
    assert shapes["layers.0.self_attn.q_proj.weight"] == (48, 64)
    assert shapes["layers.3.self_attn.q_proj.weight"] == (48, 32)


@pytest.mark.parametrize("layers", [2, 3, 4, 36])
@pytest.mark.parametrize("family", [MTP, PEagle, DFlash, DSpark])
def test_default_features_exist_in_targets_of_any_depth(family: Any, layers: int) -> None:
    with torch.device("meta"):
        draft = family.from_target(tiny_qwen3(layers=layers, dtype=torch.float32))
    assert all(0 <= tap < layers for tap in draft.taps)
    if family is DFlash and layers == 36:
        assert draft.taps == (2, 10, 18, 26, 34)


def test_a_map_that_the_configuration_does_not_know_is_refused(tmp_path: Path) -> None:
    DFlash.from_target(tiny_qwen3(), 4).save(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), "d2t": torch.arange(61)}, file)
    with pytest.raises(ConfigError, match="d2t of the whole vocabulary of 61 tokens"):
        DFlash.from_pretrained(tmp_path)


def test_weights_that_the_target_shares_are_left_out_when_read(tmp_path: Path) -> None:
    draft = DFlash.from_target(tiny_qwen3(), 4)
    draft.save(tmp_path)
    file = tmp_path / "model.safetensors"
    shared = {"embed_tokens.weight": torch.zeros(61, 32), "lm_head.weight": torch.zeros(61, 32)}
    save_file({**load_file(file), **shared}, file)
    assert DFlash.from_pretrained(tmp_path).state_dict().keys() == draft.state_dict().keys()


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        (DFlash, {"block_size": 1}, "block_size must be at least 2, found 1"),
        (DFlash, {"mask_token_id": 61}, "mask_token_id=61 is outside 0..60"),
        (DFlash, {"anchors_per_document": 0}, "anchors_per_document must be at least 1"),
        (DSpark, {"markov_head_type": "lstm"}, "must be one of vanilla, gated, rnn, found 'lstm'"),
        (PEagle, {"mask_token_id": -1}, "mask_token_id=-1 is outside"),
        (PEagle, {"num_depth": 2}, "did you mean 'num_depths'"),
        (MTP, {"num_steps": 0}, "num_steps must be at least 1"),
        (MTP, {"taps": (1,)}, "unknown option 'taps'"),
    ],
)
def test_impossible_options_are_refused(family: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        family.from_target(tiny_qwen3(), **options)


def test_sliding_layers_of_blocks_are_said_to_be_non_causal_where_engines_look(
    tmp_path: Path,
) -> None:
    sliding: dict[str, Any] = {
        "num_hidden_layers": 1, "layer_types": ("sliding_attention",), "sliding_window": 4,
    }  # fmt: skip
    DFlash.from_target(tiny_qwen3(), 4, taps=(1,), **sliding).save(tmp_path / "dflash")
    DSpark.from_target(tiny_qwen3(), 4, taps=(1,), **sliding).save(tmp_path / "dspark")
    nested, flat = (
        json.loads((tmp_path / name / "config.json").read_text()) for name in ("dflash", "dspark")
    )
    assert nested["dflash_config"]["causal"] is False
    assert flat["is_causal"] is False
