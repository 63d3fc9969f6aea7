"""What a user hears who builds, reads or writes a draft in a wrong way."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration

import spec_compile as sc
from spec_compile.drafts import MTP, DFlash, DSpark, Eagle3, PEagle, checkpoint, most_frequent
from spec_compile.errors import CaptureError, ConfigError, PlanError
from tests.models import tiny_llama

VOCAB = 53
TARGET = tiny_llama(layers=4)


def tiny_t5() -> Any:
    sizes: dict[str, Any] = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_heads": 2, "num_layers": 2}
    return T5ForConditionalGeneration(T5Config(vocab_size=VOCAB, **sizes))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (torch.arange(VOCAB) < 20, r"bool mask of shape \(53,\); pass mask.nonzero\(\)\[:, 0\]"),
        ([True, False, True], r"bool mask"),
        (torch.tensor([0] * VOCAB), "53 distinct ids below 53, ascending"),
        (torch.arange(VOCAB).flip(0), "53 distinct ids below 53, ascending"),
        (32000, r"found the number 32000; choose them.*most_frequent\(counts, 32000\)"),
        (torch.tensor(20), r"must be int64 \[V_d\].*shape \(\)"),
        (torch.rand(20), r"must be int64 \[V_d\].*float32"),
        (torch.arange(4)[:, None], r"must be int64 \[V_d\].*shape \(4, 1\)"),
        ("ids", r"must be int64 \[V_d\].*found str"),
        (torch.arange(0), "draft_vocab_size=0 must be from 1"),
    ],
)
@pytest.mark.parametrize("family", [Eagle3, DFlash])
def test_a_draft_vocabulary_that_is_no_ids_is_refused(
    family: Any, given: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        family.from_target(TARGET, draft_vocab=given)


@pytest.mark.parametrize("given", [torch.arange(VOCAB), list(range(VOCAB))])
def test_all_ids_as_a_draft_vocabulary_are_the_whole_one(given: Any) -> None:
    draft = Eagle3.from_target(TARGET, draft_vocab=given)
    assert draft.columns() is None
    assert torch.equal(draft.lm_head.weight, TARGET.lm_head.weight)


def test_a_reduced_vocabulary_is_refused_where_the_family_has_none() -> None:
    whole = MTP.from_target(TARGET)
    builds: tuple[Any, ...] = (
        lambda: MTP.from_target(TARGET, draft_vocab=[1, 2]),
        lambda: MTP.from_target(TARGET, draft_vocab_size=2),
        lambda: MTP(whole.config, draft_vocab=torch.arange(VOCAB)),
    )
    for build in builds:
        with pytest.raises(ConfigError, match="MTP has no reduced vocabulary"):
            build()


@pytest.mark.parametrize("counts", [torch.ones(3, 20), torch.tensor(3), [1, 2, 3]])
def test_counts_of_tokens_must_be_one_vector(counts: Any) -> None:
    with pytest.raises(ConfigError, match=r"counts must be a tensor \[V\].*bincount"):
        most_frequent(counts, 2)


@pytest.mark.parametrize("family", [Eagle3, PEagle, DFlash, DSpark])
def test_features_beyond_the_target_are_refused_when_a_draft_is_built(family: Any) -> None:
    with pytest.raises(PlanError, match=r"taps=\(1, 2, 4\): 4 does not exist; expected 0 .* 3"):
        family.from_target(TARGET, taps=(1, 2, 4))
    assert family.from_target(TARGET, taps=(0, 2, 3)).taps == (0, 2, 3)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (TARGET.model, "LlamaModel has no output head; give a causal LM, not its bare body"),
        (tiny_t5(), "T5ForConditionalGeneration is an encoder-decoder; give a causal LM"),
    ],
)
def test_a_model_that_is_no_causal_lm_is_refused_alike_everywhere(
    target: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Eagle3.from_target(target)
    with pytest.raises(CaptureError, match=message):
        sc.lower(target, None, sc.Plan())
    with pytest.raises(ConfigError, match=message):
        sc.Engine(target)


def test_a_target_that_is_no_module_is_refused_when_a_draft_is_built() -> None:
    with pytest.raises(ConfigError, match=r"target must be an nn\.Module, found str"):
        Eagle3.from_target("some/folder")  # type: ignore[arg-type]


def test_a_name_that_is_no_folder_is_refused() -> None:
    for read in (sc.drafts.load, Eagle3.from_pretrained):
        with pytest.raises(ConfigError, match=r"no folder 'org/name'; only local folders are read"):
            read("org/name")


@pytest.mark.parametrize("dtype", ["bfloat16", torch.int8])
def test_a_dtype_that_is_no_floating_one_is_refused(tmp_path: Path, dtype: Any) -> None:
    Eagle3.from_target(TARGET).save(tmp_path)
    builds: tuple[Any, ...] = (
        lambda: sc.drafts.load(tmp_path, dtype=dtype),
        lambda: MTP.from_target(TARGET, dtype=dtype),
    )
    for build in builds:
        with pytest.raises(ConfigError, match=r"dtype must be a floating torch\.dtype or None"):
            build()


def test_repeated_features_are_warned_of_with_what_to_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "spec_compile"):
        sc.drafts.save(Eagle3.from_target(TARGET, taps=(1, 1, 2)), tmp_path)
    assert "taps=...), ascending" in caplog.text


MISFITS: dict[str, dict[str, Any]] = {
    "target_hidden_size 64, the target has 32": {"hidden": 64},
    "vocab_size 61, the target has 53": {"vocab": 61},
}


@pytest.mark.parametrize("said", MISFITS)
@pytest.mark.parametrize("family", [Eagle3, PEagle, DFlash, DSpark, MTP])
def test_a_draft_of_another_target_is_refused_where_they_meet(family: Any, said: str) -> None:
    draft = family.from_target(tiny_llama(layers=4, **MISFITS[said]))
    message = rf"{family.__name__} was made for {said}; use {family.__name__}\.from_target"
    meet: tuple[Any, ...] = (
        lambda: sc.lower(TARGET, draft, sc.Plan()),
        lambda: sc.parallelize(TARGET, draft, sc.Plan()),
        lambda: sc.Engine(TARGET, draft, max_model_len=8),
    )
    for call in meet:
        with pytest.raises(ConfigError, match=message):
            call()


def test_a_folder_is_no_model_for_the_engine() -> None:
    wrong: list[tuple[str, tuple[Any, ...]]] = [
        (r"target must be an nn\.Module, found str", ("folder", "folder")),
        (r"target must be an nn\.Module, found str", ("folder", None)),
        (r"target must be an nn\.Module, found NoneType", (None,)),
        (r"target must be an nn\.Module, found the class", (type(TARGET),)),
        (r"draft must be an nn\.Module .* found str.*drafts\.load", (TARGET, "folder")),
    ]
    for message, arguments in wrong:
        with pytest.raises(ConfigError, match=message):
            sc.Engine(*arguments)


def small_draft() -> tuple[dict[str, Any], dict[str, Tensor]]:
    return {"size": 3}, dict(nn.Linear(3, 2).state_dict())


def test_two_writers_of_one_folder_do_not_meet_in_a_partial_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, tensors = small_draft()
    save = save_file

    def save_and_be_overtaken(*args: Any, **kwargs: Any) -> None:
        save(*args, **kwargs)
        monkeypatch.setattr(checkpoint, "save_file", save)
        checkpoint.write(tmp_path, config, tensors)

    monkeypatch.setattr(checkpoint, "save_file", save_and_be_overtaken)
    checkpoint.write(tmp_path, config, tensors)
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors"]
    assert checkpoint.read_config(tmp_path) == config
    for name, tensor in checkpoint.read_tensors(tmp_path).items():
        assert torch.equal(tensor, tensors[name])


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_failed_write_leaves_no_partial_file(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(OSError, match="directory"):
        checkpoint.write(tmp_path, *small_draft())
    assert not [file for file in os.listdir(tmp_path) if "partial" in file]


@pytest.mark.parametrize("mask", [0o022, 0o027])
def test_files_have_the_modes_that_the_umask_gives(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        checkpoint.write(tmp_path, *small_draft())
    finally:
        os.umask(before)
    modes = {file.name: file.stat().st_mode & 0o777 for file in tmp_path.iterdir()}
    assert modes == dict.fromkeys(("config.json", "model.safetensors"), 0o666 & ~mask)
