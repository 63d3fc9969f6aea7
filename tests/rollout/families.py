"""Drafts of every family for tests of the engine, and drafts that know their target's law."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from spec_compile import drafts
from tests.models import randomise
from tests.rollout.cases import near_bigram

FAMILIES: dict[str, Callable[[Any], Any]] = {
    "eagle3": lambda t: drafts.Eagle3.from_target(t, 3),
    "mtp": lambda t: drafts.MTP.from_target(t, 3, num_hidden_layers=2),
    "peagle": lambda t: drafts.PEagle.from_target(t, 4, num_hidden_layers=3),
    "dflash": lambda t: drafts.DFlash.from_target(t, 4, num_hidden_layers=2),
    "dspark": lambda t: drafts.DSpark.from_target(t, 3, num_hidden_layers=2, markov_rank=6),
    "dspark rnn": lambda t: drafts.DSpark.from_target(
        t, 4, num_hidden_layers=1, markov_rank=5, markov_head_type="rnn", sample_from_anchor=False
    ),
}


def every_other(target: Any) -> torch.Tensor:
    """Ids of a reduced vocabulary."""
    return torch.arange(0, target.config.vocab_size, 2)


VARIANTS: dict[str, Callable[[Any], Any]] = {
    "eagle3 of two layers": lambda t: drafts.Eagle3.from_target(t, 3, num_hidden_layers=2),
    "dflash reduced": lambda t: drafts.DFlash.from_target(
        t, 4, num_hidden_layers=1, draft_vocab=every_other(t)
    ),
    "dspark reduced": lambda t: drafts.DSpark.from_target(
        t, 3, num_hidden_layers=1, markov_rank=6, draft_vocab=every_other(t)
    ),
}
"""Drafts that take the paths of their family, but for layers or vocabulary."""


def make(family: str, target: Any) -> Any:
    """Build a draft with random weights."""
    return randomise((FAMILIES | VARIANTS)[family](target), seed=4)


def constant_law(vocab: int = 23) -> Any:
    """Make a target whose law is the same everywhere."""
    target = near_bigram(vocab, context=0.0)
    with torch.no_grad():
        table = target.get_input_embeddings().weight
        table.copy_(table[0].expand_as(table).clone())
    return target


def knowing(family: str, target: Any) -> Any:
    """Build a draft whose law is that of a `constant_law` target: layers add nothing, norms agree."""
    draft = make(family, target)
    dim = target.config.hidden_size
    final = target.model.norm.weight
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "markov_w2.weight")):
                parameter.zero_()
            if name.endswith("mask_hidden"):
                parameter.copy_(target.get_input_embeddings().weight[0].repeat(3))
            if name in ("norm.weight", "mtp.norm.weight"):
                parameter.copy_(final)
            if name == "lm_head.weight":
                parameter.copy_(target.lm_head.weight)
            if name.endswith("fc.weight"):
                parameter.zero_()
                parameter[:, :dim] = torch.eye(dim)
            if name.endswith("pre_fc_norm_embedding.weight"):
                parameter.fill_(1.0)
    return draft
