"""Draft modules of other projects, unmodified, compiled and run on two ranks, step like they do on one device."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import spec_compile as sc
from spec_compile import Plan, lower
from spec_compile.errors import ConfigError
from tests.models import packed_batch, randomise, tiny_qwen3
from tests.oracle import dense_step
from tests.parallel import run_lowered
from tests.step_cases import assert_gradients, gradients_of, joined

os.environ.setdefault("SPECULATORS_DISABLE_COMPILE", "1")
pytestmark = pytest.mark.peers

VOCAB, DIM, KNOWN = 61, 32, 17
LENGTHS = (7, 21, 1, 16, 0, 3)
ANCHORS = (0, 3, 6, 7, 9, 15, 16, 27, 28, 29, 44, 46, -1, -1)


def layer_config(**options: Any) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(
        hidden_size=DIM, intermediate_size=40, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        vocab_size=VOCAB, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, **options,
    )  # fmt: skip


def loaded(model: Any) -> Any:
    """In fp64 with random weights; what is read from a verifier, and frozen, is random too."""
    return randomise(model.double(), seed=2)


def chosen() -> torch.Tensor:
    """Mark the tokens of a reduced vocabulary, bool [VOCAB]."""
    known = torch.zeros(VOCAB, dtype=torch.bool)
    known[3 : 3 + 3 * KNOWN : 3] = True
    return known


def offsets() -> torch.Tensor:
    return chosen().nonzero()[:, 0] - torch.arange(KNOWN)


def with_map(model: Any) -> Any:
    """Give a model of speculators with a reduced vocabulary its map."""
    model.load_vocab_mappings(chosen(), offsets())
    return model


def check(draft: nn.Module, branches: list[tuple[str, ...]], anchors: Any = None) -> None:
    target = tiny_qwen3(layers=3, vocab=VOCAB, hidden=DIM)
    batch = packed_batch(LENGTHS, vocab=VOCAB, seed=4)
    batch.anchors = anchors
    wanted = dense_step(target, draft, batch, None)
    lowered = lower(target, draft, Plan(cp=2))
    found = [fact.branches for fact in lowered.facts.attentions if "draft" in fact.owner]
    assert found == branches

    def step(parallel: Any, rank: int) -> Any:
        result = parallel.step(batch, None)
        return result.draft_loss, gradients_of(parallel)

    outcomes = run_lowered(lowered, target, draft, step)
    for loss, _ in outcomes:
        assert loss == pytest.approx(wanted.draft_loss, rel=1e-5)
    trained = {n for n, p in draft.named_parameters() if p.requires_grad}
    names = {n: g for n, g in joined(wanted).items() if n.removeprefix("draft.") in trained}
    ours = [{n: g for n, g in grads.items() if n in names} for _, grads in outcomes]
    # their rotary tables are fp32, whose sines differ by the shape that they are computed in
    assert_gradients(ours, names, tolerance=1e-5)


def test_eagle3_of_speculators() -> None:
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    from spec_compile.integrations.speculators import from_speculators

    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer_config(num_hidden_layers=1), draft_vocab_size=VOCAB,
        eagle_aux_hidden_state_layer_ids=[0, 1, 2],
    )  # fmt: skip
    draft = from_speculators(loaded(Eagle3DraftModel(config)), ttt_steps=3)
    check(draft, [(), ("diagonal",), ("diagonal", "diagonal")])


def test_dflash_of_speculators() -> None:
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig

    from spec_compile.integrations.speculators import from_speculators

    config = DFlashSpeculatorConfig(
        transformer_layer_config=layer_config(num_hidden_layers=2), draft_vocab_size=VOCAB, block_size=3,
        aux_hidden_state_layer_ids=[1, 2], mask_token_id=VOCAB - 1,
    )  # fmt: skip
    draft = from_speculators(loaded(DFlashDraftModel(config)))
    check(draft, [("block",), ("block",)], torch.tensor(ANCHORS))


def test_eagle3_of_speculators_with_a_reduced_vocabulary() -> None:
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    from spec_compile.integrations.speculators import from_speculators

    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer_config(num_hidden_layers=1), draft_vocab_size=17,
        eagle_aux_hidden_state_layer_ids=[0, 1, 2],
    )  # fmt: skip
    model = loaded(Eagle3DraftModel(config))
    with pytest.raises(ConfigError, match="without a map"):
        from_speculators(model)
    check(from_speculators(with_map(model), ttt_steps=2), [(), ("diagonal",)])


def test_eagle3_of_speculators_with_two_layers() -> None:
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    from spec_compile.integrations.speculators import from_speculators

    layer = layer_config(
        num_hidden_layers=2, use_sliding_window=True, sliding_window=5,
        layer_types=["full_attention", "sliding_attention"],
    )  # fmt: skip
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer, draft_vocab_size=VOCAB,
        eagle_aux_hidden_state_layer_ids=[0, 1, 2],
    )  # fmt: skip
    draft = from_speculators(loaded(Eagle3DraftModel(config)), ttt_steps=2)
    check(draft, [(), (), ("diagonal",), ("diagonal",)])


def test_block_drafts_of_speculators_with_reduced_vocabularies() -> None:
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
    from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig

    from spec_compile.integrations.speculators import from_speculators

    sizes: dict[str, Any] = {
        "transformer_layer_config": layer_config(num_hidden_layers=1), "draft_vocab_size": KNOWN,
        "block_size": 3, "aux_hidden_state_layer_ids": [1, 2], "mask_token_id": VOCAB - 1,
    }  # fmt: skip
    dflash = loaded(DFlashDraftModel(DFlashSpeculatorConfig(**sizes)))
    with pytest.raises(ConfigError, match="without a map"):
        from_speculators(dflash)
    dspark = loaded(DSparkDraftModel(DSparkSpeculatorConfig(**sizes, markov_rank=6)))
    for model in (dflash, dspark):
        model.lm_head.weight.requires_grad_(True)
        check(from_speculators(with_map(model)), [("block",)], torch.tensor(ANCHORS))


@pytest.mark.parametrize("anchors", [None, ANCHORS], ids=["all rows", "at anchors"])
def test_peagle_of_speculators(anchors: Any) -> None:
    """Its second layer has a window, which is shorter by one at each depth."""
    from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig

    from spec_compile.integrations.speculators import from_speculators

    sliding = {
        "use_sliding_window": True, "sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"],
    }  # fmt: skip
    config = PEagleSpeculatorConfig(
        transformer_layer_config=layer_config(num_hidden_layers=2, **sliding), draft_vocab_size=VOCAB,
        eagle_aux_hidden_state_layer_ids=[0, 1, 2], mask_token_id=VOCAB - 1,
    )  # fmt: skip
    number = None if anchors is None else 4
    draft = from_speculators(
        loaded(PEagleDraftModel(config)), num_depths=3, anchors_per_document=number
    )
    kind = "diagonal" if anchors is None else "block"
    given = None if anchors is None else torch.tensor(anchors)
    check(draft, [(kind,) * depth for depth in range(3)] * 2, given)


def test_mtp_of_speculators() -> None:
    from spec_compile.integrations.speculators import from_speculators
    from tests.peers.test_mtp_speculators import mtp_model

    check(from_speculators(mtp_model(layer_config(num_hidden_layers=1), 2)), [(), ()])


@pytest.mark.parametrize("window", [None, 5])
def test_dspark_of_speculators(window: int | None) -> None:
    from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig

    from spec_compile.integrations.speculators import from_speculators

    sliding = {} if window is None else {
        "use_sliding_window": True, "sliding_window": window,
        "layer_types": ["full_attention", "sliding_attention"],
    }  # fmt: skip
    config = DSparkSpeculatorConfig(
        transformer_layer_config=layer_config(num_hidden_layers=2, **sliding), draft_vocab_size=VOCAB,
        block_size=3, aux_hidden_state_layer_ids=[1, 2], mask_token_id=VOCAB - 1, markov_rank=6,
        markov_head_type="gated", sample_from_anchor=True,
    )  # fmt: skip
    draft = from_speculators(loaded(DSparkDraftModel(config)))
    last = ("block",) if window is None else ("block",) * 3
    check(draft, [("block",), last], torch.tensor(ANCHORS))


def test_dflash_of_specforge() -> None:
    from specforge.modeling.draft.dflash import DFlashDraftModel

    from spec_compile.integrations.specforge import from_specforge

    config = layer_config(num_hidden_layers=2)
    config.block_size, config.num_target_layers = 3, 3
    config.dflash_config = {"target_layer_ids": [0, 1], "mask_token_id": VOCAB - 1}
    draft = from_specforge(loaded(DFlashDraftModel(config)))
    check(draft, [("block",), ("block",)], torch.tensor(ANCHORS))


@pytest.mark.parametrize("reduced", [False, True], ids=["defaults", "reduced, head without norm"])
def test_eagle3_of_specforge_shares_its_parameters(reduced: bool, tmp_path: Path) -> None:
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
    from transformers import LlamaConfig

    from spec_compile.integrations.specforge import from_specforge

    config = LlamaConfig(**layer_config(num_hidden_layers=1).to_dict() | {"pad_token_id": 0})
    config.draft_vocab_size, config.norm_output = (KNOWN, False) if reduced else (VOCAB, True)
    model = loaded(LlamaForCausalLMEagle3(config))
    if reduced:
        with pytest.raises(ConfigError, match="without a map"):
            from_specforge(model, taps=(0, 1, 2))
        torch.save({"t2d": chosen(), "d2t": offsets()}, tmp_path / "vocabulary.pt")
        model.load_vocab_mapping(str(tmp_path / "vocabulary.pt"))
    draft = from_specforge(model, taps=(0, 1, 2), ttt_length=2)
    theirs = dict(model.named_parameters())
    assert all(parameter is theirs[name] for name, parameter in draft.named_parameters())
    check(draft, [(), ("diagonal",)])
    if reduced:
        with pytest.raises(ConfigError, match="head_norm=False has no public form"):
            sc.drafts.save(draft, tmp_path)


def test_modules_that_are_not_supported_are_refused_by_name() -> None:
    from spec_compile.integrations.specforge import from_specforge
    from spec_compile.integrations.speculators import from_speculators

    for adapt in (from_speculators, from_specforge):
        with pytest.raises(ConfigError, match="found Linear"):
            adapt(nn.Linear(2, 2))
