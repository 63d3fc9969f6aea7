"""Checkpoint folders that were edited by hand, cut off, or mean what drafts here do not compute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import spec_compile as sc
from spec_compile.drafts import DFlash, DSpark, Eagle3
from spec_compile.errors import ConfigError
from tests.models import tiny_qwen3

TARGET = tiny_qwen3()


def edited(folder: Path, draft: Any, *, form: Any = "raw", **changes: Any) -> Path:
    """A saved draft with changed fields; ``a__b`` is field b of the object a."""
    sc.drafts.save(draft, folder, form=form)
    config = json.loads((folder / "config.json").read_text())
    for name, value in changes.items():
        *outer, last = name.split("__")
        place = config
        for each in outer:
            place = place[each]
        place.pop(last, None)
        if value != "gone":
            place[last] = value
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "32"}, "hidden_size must be int, found '32'"),
        ({"intermediate_size": 72.5}, "intermediate_size must be int, found 72.5"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be int, found True"),
        ({"num_key_value_heads": 0}, "num_key_value_heads must be at least 1, found 0"),
        ({"num_attention_heads": 0, "head_dim": "gone"}, "num_attention_heads must be at least 1"),
        ({"draft_vocab_size": "61"}, "draft_vocab_size must be int | None, found '61'"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps must be float, found '1e-6'"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps must not be negative"),
        ({"rope_theta": -1}, "rope_theta must be above 0, found -1"),
        ({"rope_theta": "big"}, "rope_theta must be float, found 'big'"),
        ({"initializer_range": -1}, "initializer_range must not be negative"),
        ({"norm_before_residual": "no"}, "norm_before_residual must be bool, found 'no'"),
        ({"architectures": 7}, "architectures must be a list of str, found 7"),
        ({"eagle_aux_hidden_state_layer_ids": [1, "2"]}, "must be a list of int"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object, found 'linear'"),
        ({"rope_scaling": {"rope_type": "longrope"}}, r"must be one of .*found 'longrope'"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor=0.5; drafts here rotate whole"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_a_field_of_another_kind_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = edited(tmp_path, Eagle3.from_target(TARGET), **changes)
    with pytest.raises(ConfigError, match=message.replace(" | ", r" \| ")):
        sc.drafts.load(folder)


def test_a_kind_that_is_no_word_is_refused(tmp_path: Path) -> None:
    draft = Eagle3.from_target(TARGET, taps=(0, 1, 2))
    folder = edited(tmp_path, draft, form="speculators", speculators_model_type=["eagle3"])
    with pytest.raises(ConfigError, match="is not known; expected one of eagle3"):
        sc.drafts.load(folder)


SLIDING: dict[str, Any] = {
    "num_hidden_layers": 1, "taps": (1,), "layer_types": ("sliding_attention",), "sliding_window": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "form", "changes"),
    [
        (DFlash, "raw", {"dflash_config__causal": True}),
        (DFlash, "raw", {"dflash_config__causal": "gone", "sliding_window_non_causal": "gone"}),
        (DFlash, "speculators", {"sliding_window_non_causal": False}),
        (DSpark, "raw", {"is_causal": True}),
        (DSpark, "speculators", {"sliding_window_non_causal": "gone"}),
    ],
)
def test_blocks_that_are_causal_inside_are_refused_and_the_others_read(
    tmp_path: Path, family: Any, form: Any, changes: dict[str, Any]
) -> None:
    draft = family.from_target(TARGET, 4, **SLIDING)
    assert sc.drafts.load(edited(tmp_path / "own", draft, form=form)).config == draft.config
    folder = edited(tmp_path / "other", draft, form=form, **changes)
    with pytest.raises(ConfigError, match=r"blocks are causal inside.*is_causal: false"):
        sc.drafts.load(folder)


def test_a_decay_that_divides_by_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"loss_decay_gamma must be above 0, found 0"):
        DFlash.from_target(TARGET, 4, loss_decay_gamma=0.0)


def test_a_shard_of_a_narrow_type_does_not_round_the_others(tmp_path: Path) -> None:
    draft = Eagle3.from_target(TARGET, dtype=torch.float32)
    tensors = load_file(edited(tmp_path, draft) / "model.safetensors")
    narrow = {"fc.weight": tensors.pop("fc.weight").bfloat16()}
    save_file(narrow, tmp_path / "a.safetensors")
    save_file(tensors, tmp_path / "b.safetensors")
    places = {**dict.fromkeys(narrow, "a.safetensors"), **dict.fromkeys(tensors, "b.safetensors")}
    index = json.dumps({"weight_map": places})
    (tmp_path / "model.safetensors.index.json").write_text(index)
    found = sc.drafts.load(tmp_path).state_dict()
    assert torch.equal(found["fc.weight"], narrow["fc.weight"].float())
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_weights_that_were_cut_off_are_refused_with_their_file(tmp_path: Path) -> None:
    folder = edited(tmp_path, Eagle3.from_target(TARGET))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"model.safetensors: .*write or download it again"):
        sc.drafts.load(folder)


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_an_index_without_a_weight_map_is_refused(tmp_path: Path, index: str) -> None:
    folder = edited(tmp_path, Eagle3.from_target(TARGET))
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ConfigError, match="must hold an object with a weight_map"):
        sc.drafts.load(folder)
