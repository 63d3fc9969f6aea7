"""Write and read draft checkpoints in the public forms, whatever the family."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from spec_compile.errors import ConfigError
from spec_compile.ir.public_names import checkpoint_of, public_name

from . import checkpoint, speculators_form
from .base import Draft
from .dflash import DFlash
from .dspark import DSpark
from .eagle3 import Eagle3
from .mtp import MTP
from .peagle import PEagle

log = logging.getLogger(__name__)
Form = Literal["raw", "speculators"]
KINDS: dict[str, type[Draft]] = {
    "eagle3": Eagle3, "peagle": PEagle, "dflash": DFlash, "dspark": DSpark, "mtp": MTP,
}  # fmt: skip
BY_ARCHITECTURE: dict[str, type[Draft]] = {
    "LlamaForCausalLMEagle3": Eagle3,
    "Eagle3LlamaForCausalLM": Eagle3,
    "Eagle3Qwen3ForCausalLM": Eagle3,
    "PEagleDraftModel": PEagle,
    "PeagleLlamaForCausalLM": PEagle,
    "PeagleQwen3ForCausalLM": PEagle,
    "DFlashDraftModel": DFlash,
    "Qwen3DSparkModel": DSpark,
    "DSparkDraftModel": DSpark,
    "MTPDraftModel": MTP,
}
PARALLEL = ("parallel_drafting", "pard_token", "ptd_token_id")
"""A raw file of EAGLE-3's architecture that says one of these is a P-EAGLE; engines know no other name for it."""


def save(
    draft: nn.Module,
    path: str | Path,
    *,
    form: Form = "raw",
    tensors: Iterable[tuple[str, Tensor]] | Mapping[str, Tensor] | None = None,
    verifier: str | None = None,
    target: nn.Module | None = None,
) -> None:
    """Write a draft as a checkpoint folder that engines and trainers of others read.

    Embedding and head that the draft reads from its target are not written: a reader shares the target's.
    Vocabulary maps are written wherever the draft's vocabulary is a part of the target's.

    Args:
        draft: one of the library.
        path: a folder; made when missing.
        form: "raw", as the drafts' own authors publish them, or "speculators", as that package does.
        tensors: (name, tensor) of every tensor, as ``model.export_weights("draft")`` gives them; None: the
            draft's own.
        verifier: name or path of the target, for the speculators form.
        target: whose architecture the speculators form names; None: not named.

    Raises:
        ConfigError: the draft is not of the library, has no such form, or ``tensors`` are not its own.
    """
    kind = kind_of(draft)
    given = dict(draft.state_dict() if tensors is None else tensors)
    named = {public_name(name): tensor for name, tensor in given.items()}
    expected = checkpoint_of(draft).keys()
    if named.keys() != expected:
        odd = sorted(named.keys() ^ expected)
        raise ConfigError(
            f"{type(draft).__name__}: tensors must be those of its state dict; missing or unknown: {', '.join(odd[:4])}"
        )
    dtype = next(t.dtype for t in named.values() if t.is_floating_point())
    known: Any = draft
    if not ascending(known.taps):
        log.warning(
            "%s reads features %s; engines capture each layer once, in ascending order, and would feed it others: make "
            "the draft with distinct layers, from_target(target, taps=...), ascending",
            type(draft).__name__, known.taps,
        )  # fmt: skip
    if form == "raw":
        checkpoint.write(path, known.raw_config(dtype), named)
        return
    if form != "speculators" or kind not in speculators_form.OPTIONS:
        raise ConfigError(
            f"{type(draft).__name__} has no form {form!r}; expected 'raw'"
            + (" or 'speculators'" if kind in speculators_form.OPTIONS else "")
        )
    written = speculators_form.from_raw(
        kind, known.config.to_dict(dtype), taps=known.taps, num_draft_tokens=known.num_draft_tokens,
        verifier=verifier,
        verifier_architectures=() if target is None else (type(target).__name__,),
    )  # fmt: skip
    checkpoint.write(path, written, speculators_form.public_names(kind, named))


def load(
    path: str | Path,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    **overrides: Any,
) -> Draft:
    """Read a draft of any family from a checkpoint folder of either public form.

    Args:
        path: a folder with ``config.json`` and safetensors weights.
        device: None means the default device.
        dtype: None means that of the file.
        overrides: fields of the configuration that the file lacks or has wrong.

    Raises:
        ConfigError: the family is unknown, or the files do not fit each other.
    """
    config = checkpoint.read_config(path)
    if speculators_form.is_speculators(config):
        # a kind that is not known is refused below
        family = KINDS.get(str(config[speculators_form.MARK]), Eagle3)
    else:
        names = config.get("architectures") or []
        found = [BY_ARCHITECTURE[name] for name in names if name in BY_ARCHITECTURE]
        if not found:
            raise ConfigError(
                f"{path}: architectures={names} name no draft that is known here; expected one of "
                f"{', '.join(BY_ARCHITECTURE)}. Read it with from_pretrained of the right class"
            )
        family = found[0]
        said = (config.get(name) for name in PARALLEL)
        if family is Eagle3 and any(value is not None and value is not False for value in said):
            family = PEagle
    return family.from_pretrained(path, device=device, dtype=dtype, **overrides)


def ascending(taps: tuple[int, ...]) -> bool:
    """Whether engines, which capture each layer once and in order, can feed a draft with these taps."""
    return all(before < after for before, after in pairwise(taps))


def kind_of(draft: nn.Module) -> str:
    """Name the family of a draft of the library.

    Raises:
        ConfigError: it is another class.
    """
    for kind, family in KINDS.items():
        if type(draft) is family:
            return kind
    raise ConfigError(
        f"{type(draft).__name__} is not a draft of the library; save its state dict, or use its own format"
    )
