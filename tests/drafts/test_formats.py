from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

import spec_compile as sc
from spec_compile.drafts import MTP, DFlash, DSpark, Eagle3, PEagle
from spec_compile.errors import ConfigError
from tests.models import gated_draft, packed_batch, randomise, tiny_llama, tiny_qwen3
from tests.oracle import run_target

FAMILIES: dict[str, Any] = {
    "eagle3": lambda t: Eagle3.from_target(t, 3, norm_before_residual=True, fc_norm=True),
    "eagle3 qwen": lambda t: Eagle3.from_target(t, 2, qk_norm=True, norm_output=True),
    "peagle": lambda t: PEagle.from_target(t, 5, taps=(1, 0), norm_before_residual=True),
    "dflash": lambda t: DFlash.from_target(t, 4, num_hidden_layers=3, loss_decay_gamma=2.0),
    "dflash from anchor": lambda t: DFlash.from_target(t, 4, sample_from_anchor=True),
    "dflash sliding": lambda t: DFlash.from_target(
        t,
        4,
        num_hidden_layers=2,
        layer_types=("sliding_attention", "full_attention"),
        sliding_window=9,
    ),
    "dspark": lambda t: DSpark.from_target(t, 3, num_hidden_layers=2, markov_rank=5),
    "dspark behind anchor": lambda t: DSpark.from_target(t, 3, sample_from_anchor=False),
    "mtp": lambda t: MTP.from_target(t, 2, num_hidden_layers=2),
}
BOTH = [(family, form) for family in FAMILIES for form in ("raw", "speculators")][:-1]


def config_of(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / "config.json").read_text())
    return found


def edit(path: Path, **changes: Any) -> None:
    config = config_of(path) | changes
    kept = {name: value for name, value in config.items() if value is not ...}
    (path / "config.json").write_text(json.dumps(kept))


@pytest.mark.parametrize(("family", "form"), BOTH)
@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen3])
def test_saved_draft_comes_back_whole(tmp_path: Path, make: Any, family: str, form: Any) -> None:
    draft = randomise(FAMILIES[family](make()), seed=5)
    sc.drafts.save(draft, tmp_path, form=form, verifier="target")
    back = sc.drafts.load(tmp_path)
    assert type(back) is type(draft)
    assert back.config == draft.config
    state = back.state_dict()
    assert state.keys() == draft.state_dict().keys()
    for name, tensor in draft.state_dict().items():
        assert torch.equal(state[name], tensor), name


@pytest.mark.slow
def test_trained_weights_of_a_compiled_draft_are_written_under_public_names(tmp_path: Path) -> None:
    target = tiny_llama()
    draft = Eagle3.from_target(target, 2)
    plain = {name: tensor.clone() for name, tensor in draft.state_dict().items()}
    model = sc.parallelize(target, draft, sc.Plan())
    model.step(packed_batch(), None)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(torch.ones_like(parameter), alpha=0.1)
    sc.drafts.save(draft, tmp_path, tensors=model.export_weights("draft", dtype=torch.float32))
    model.close()
    back: Any = sc.drafts.load(tmp_path)
    assert back.state_dict().keys() == plain.keys()
    assert back.fc.weight.dtype == torch.float32
    torch.testing.assert_close(back.fc.weight, draft.fc.weight.float(), rtol=0, atol=0)
    assert not torch.equal(back.fc.weight.double(), plain["fc.weight"])


def test_speculators_form_has_its_fields_and_names(tmp_path: Path) -> None:
    target = tiny_llama()
    draft = Eagle3.from_target(target, 3)
    sc.drafts.save(draft, tmp_path, form="speculators", verifier="some/target", target=target)
    config = config_of(tmp_path)
    expected = {
        "speculators_model_type": "eagle3",
        "draft_vocab_size": 53,
        "target_hidden_size": 32,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "eagle_aux_hidden_state_layer_ids": [2, 2, 1],
        "num_aux_hidden_states": 3,
    }
    assert {key: config.get(key) for key in expected} == expected
    assert config["speculators_config"] == {
        "algorithm": "eagle3",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "default_proposal_method": "greedy",
        "verifier": {"name_or_path": "some/target", "architectures": ["LlamaForCausalLM"]},
    }
    layer = config["transformer_layer_config"]
    assert (layer["model_type"], layer["vocab_size"], layer["num_hidden_layers"]) == (
        "llama",
        53,
        1,
    )
    assert layer["rope_parameters"]["rope_theta"] == 500.0
    assert layer["rope_parameters"]["rope_type"] == "llama3"
    names = set(load_file(tmp_path / "model.safetensors"))
    assert "layers.0.hidden_norm.weight" in names
    assert not any("midlayer" in name or "embed" in name for name in names)


@pytest.mark.parametrize(("family", "layout"), [("dflash", False), ("dspark", True)])
def test_block_drafts_say_their_layout_in_both_forms(
    tmp_path: Path, family: str, layout: bool
) -> None:
    draft = FAMILIES[family](tiny_qwen3(layers=8))
    sc.drafts.save(draft, tmp_path)
    raw = config_of(tmp_path)
    assert raw["sample_from_anchor"] is layout
    assert raw["num_aux_hidden_states"] == len(draft.taps)
    sc.drafts.save(draft, tmp_path, form="speculators")
    config = config_of(tmp_path)
    assert config["sample_from_anchor"] is layout
    assert config["aux_hidden_state_layer_ids"] == list(draft.taps)
    assert "target_layer_ids" not in config


@pytest.mark.parametrize(
    ("family", "field"), [("eagle3", "norm_before_residual"), ("dspark", "sample_from_anchor")]
)
def test_field_that_readers_fill_in_differently_is_asked_for(
    tmp_path: Path, family: str, field: str
) -> None:
    draft = FAMILIES[family](tiny_qwen3())
    sc.drafts.save(draft, tmp_path, form="speculators")
    edit(tmp_path, **{field: ...})
    with pytest.raises(ConfigError, match=f"does not say {field}"):
        sc.drafts.load(tmp_path)
    given: dict[str, Any] = {field: True}
    assert sc.drafts.load(tmp_path, **given).config == draft.config


def test_a53_taps_in_both_dialects_read_the_same_stream() -> None:
    target = tiny_llama(layers=5)
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            if name.endswith(("embed_tokens.weight", "o_proj.weight", "down_proj.weight")):
                parameter.zero_()
    for i, layer in enumerate(target.model.layers):
        layer.mlp.register_forward_hook(lambda _m, _i, out, i=i: out + i)
    batch = packed_batch((3,))
    taps = sc.drafts.taps_of_outputs([-1, 0, 3])
    assert taps == (0, 1, 4)
    assert sc.drafts.outputs_of_taps(taps) == [-1, 0, 3]
    features = run_target(target, batch, taps, grad=False).features
    # after i layers: 0 + 1 + ... + (i - 1)
    assert features[0, ::32].tolist() == [0, 0, 6]
    written = DFlash.from_target(target, 4, taps=taps).config.to_dict(torch.float32)
    assert written["dflash_config"]["target_layer_ids"] == [-1, 0, 3]


def test_teacher_logits_of_the_draft_stage_are_the_targets_own() -> None:
    target = tiny_qwen3(dtype=torch.float32)
    row = run_target(target, packed_batch((9,), vocab=61), (), grad=False)
    again = F.linear(row.hidden, target.get_output_embeddings().weight)
    torch.testing.assert_close(again, row.logits, rtol=1e-5, atol=1e-5)


def test_a67_tied_flag_of_a_copied_configuration_does_not_tie(tmp_path: Path) -> None:
    draft = randomise(Eagle3.from_target(tiny_qwen3(tied=True), 2), seed=3)
    sc.drafts.save(draft, tmp_path)
    edit(tmp_path, tie_word_embeddings=True)
    back: Any = sc.drafts.load(tmp_path)
    assert torch.equal(back.lm_head.weight, draft.lm_head.weight)


def test_what_cannot_be_written_or_read_is_refused(tmp_path: Path) -> None:
    target = tiny_llama()
    with pytest.raises(ConfigError, match="MTP has no form 'speculators'; expected 'raw'"):
        sc.drafts.save(MTP.from_target(target), tmp_path, form="speculators")
    with pytest.raises(ConfigError, match="GatedDraft is not a draft of the library"):
        sc.drafts.save(gated_draft(target), tmp_path)
    draft = Eagle3.from_target(target)
    named = {n.replace("fc.", "draft.fc.", 1): t for n, t in draft.state_dict().items()}
    with pytest.raises(ConfigError, match=r"missing or unknown: draft\.fc\.weight, fc\.weight"):
        sc.drafts.save(draft, tmp_path, tensors=named)
    sc.drafts.save(draft, tmp_path)
    edit(tmp_path, architectures=["Eagle3ForElephants"])
    with pytest.raises(ConfigError, match="Eagle3ForElephants"):
        sc.drafts.load(tmp_path)
    sc.drafts.save(draft, tmp_path, form="speculators")
    edit(tmp_path, speculators_model_type="eagle9")
    with pytest.raises(ConfigError, match="eagle9"):
        sc.drafts.load(tmp_path)


def test_features_in_an_order_that_engines_do_not_have_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = tiny_llama(layers=8)
    with caplog.at_level(logging.WARNING, "spec_compile"):
        sc.drafts.save(Eagle3.from_target(target), tmp_path)
        assert not caplog.records
        sc.drafts.save(Eagle3.from_target(target, taps=(5, 2, 3)), tmp_path)
    assert "(5, 2, 3)" in caplog.text


def test_several_layers_of_eagle3_have_the_speculators_form_alone(tmp_path: Path) -> None:
    draft = randomise(Eagle3.from_target(tiny_llama(), 2, num_hidden_layers=3), seed=1)
    for write in (draft.save, lambda path: sc.drafts.save(draft, path)):
        with pytest.raises(ConfigError, match="3 layers has no raw form"):
            write(tmp_path)
    sc.drafts.save(draft, tmp_path, form="speculators")
    names = set(load_file(tmp_path / "model.safetensors"))
    layers = {name.split(".")[1] for name in names if name.startswith("layers.")}
    assert layers == {"0", "1", "2"}
    assert not any("midlayer" in name for name in names)
    assert config_of(tmp_path)["transformer_layer_config"]["num_hidden_layers"] == 3
    back = sc.drafts.load(tmp_path)
    assert back.config == draft.config
    for name, tensor in draft.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name


def test_norm_output_of_two_meanings_is_never_written_and_must_be_said(tmp_path: Path) -> None:
    draft = Eagle3.from_target(tiny_llama(), 2)
    sc.drafts.save(draft, tmp_path)
    raw = config_of(tmp_path)
    assert "norm_output" not in raw
    file = tmp_path / "config.json"
    raw.pop("head_norm")
    file.write_text(json.dumps({**raw, "norm_output": False}))
    with pytest.raises(ConfigError, match="pass head_norm=False or head_norm=True"):
        sc.drafts.load(tmp_path)
    assert not sc.drafts.load(tmp_path, head_norm=False).config.head_norm
    assert sc.drafts.load(tmp_path, head_norm=True).config == draft.config
    for form in ("raw", "speculators"):
        with pytest.raises(ConfigError, match="head_norm=False has no public form"):
            sc.drafts.save(sc.drafts.load(tmp_path, head_norm=False), tmp_path / "no", form=form)


@pytest.mark.parametrize(
    "said", [{"parallel_drafting": True}, {"pard_token": 0}, {"ptd_token_id": 0}], ids=str
)
def test_eagle3_that_drafts_in_parallel_is_read_as_peagle(
    tmp_path: Path, said: dict[str, Any]
) -> None:
    sc.drafts.save(randomise(PEagle.from_target(tiny_llama(), 3), seed=1), tmp_path)
    unsaid: dict[str, Any] = {"parallel_drafting": False, "pard_token": ..., "mask_token_id": 0}
    edit(tmp_path, **unsaid | said)
    assert type(sc.drafts.load(tmp_path)) is PEagle
