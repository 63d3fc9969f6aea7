"""What every draft of the library does alike: weights from a seed, from a target, from a file."""

from __future__ import annotations

import logging
from functools import reduce
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from spec_compile.errors import ConfigError
from spec_compile.ir.public_names import checkpoint_of
from spec_compile.pairing import check_target, why_not_causal

from . import checkpoint, speculators_form
from .config import DraftConfig
from .draft_vocabulary import as_ids, check_tokens, offsets_of, read_map
from .layers import RMSNorm

log = logging.getLogger(__name__)
SHARED = ("embed_tokens.weight", "lm_head.weight")
"""Tensors of checkpoints that a draft without them reads from its target instead."""


def _check_dtype(family: str, dtype: object) -> None:
    if dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        return
    raise ConfigError(
        f"{family}: dtype must be a floating torch.dtype or None, found {dtype!r}; pass for instance torch.bfloat16"
    )


class Draft(nn.Module):
    """A draft with a configuration; subclasses make their parts in `build`."""

    config_class: ClassVar[type[DraftConfig]]
    config: Any

    def __init__(
        self,
        config: Any,
        *,
        seed: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        draft_vocab: Tensor | None = None,
    ) -> None:
        """Build from sizes, with normal(0, initializer_range) weights drawn from ``seed`` alone.

        Raises:
            ConfigError: ``draft_vocab`` is not the ids of the configuration's vocabulary, which a reduced one needs,
                or ``dtype`` is no floating torch.dtype.
        """
        super().__init__()
        _check_dtype(config.family, dtype)
        device = torch.get_default_device() if device is None else torch.device(device)
        self.config = config
        with torch.device("meta"):
            self.build(config)
        self.to(dtype=dtype or torch.get_default_dtype()).to_empty(device=device)
        self.reset_parameters(seed)
        if draft_vocab is not None and not hasattr(config, "draft_vocab_size"):
            raise config.whole_vocabulary()
        size: int = getattr(config, "draft_vocab_size", config.vocab_size)
        if draft_vocab is not None or size != config.vocab_size:
            tokens = check_tokens(config.family, draft_vocab, size, config.vocab_size)
            if size != config.vocab_size:
                self._set_vocabulary(tokens)

    def _set_vocabulary(self, tokens: Tensor) -> None:
        known = torch.zeros(self.config.vocab_size, dtype=torch.bool)
        known[tokens] = True
        self.get_buffer("d2t").copy_(offsets_of(tokens))
        self.get_buffer("t2d").copy_(known)

    def build(self, config: Any) -> None:
        """Make the parts."""
        raise NotImplementedError

    @torch.no_grad()
    def reset_parameters(self, seed: int) -> None:
        """Draw all weights anew, the same on every device; the global random state is untouched."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.is_meta:
                continue
            if parameter.ndim > 1:
                drawn = torch.empty(parameter.shape, device="cpu")
                parameter.copy_(
                    drawn.normal_(0.0, self.config.initializer_range, generator=generator)
                )
            else:
                parameter.zero_()
        for module in self.modules():
            if isinstance(module, RMSNorm) and not module.weight.is_meta:
                module.weight.fill_(1.0)

    @classmethod
    def _from_target(
        cls,
        target: nn.Module,
        seed: int,
        dtype: torch.dtype | None,
        *,
        draft_vocab: Tensor | None = None,
        **overrides: Any,
    ) -> Self:
        """Make a new draft for a target: its sizes, its RoPE; a meta target gives a meta draft."""
        check_target(target)
        problem = why_not_causal(target)
        if problem is not None:
            raise ConfigError(problem)
        model: Any = target
        weight: Tensor = model.get_output_embeddings().weight
        if draft_vocab is not None:
            draft_vocab = as_ids(cls.config_class.family, draft_vocab)
            overrides.setdefault("draft_vocab_size", len(draft_vocab))
        config = cls.config_class.from_target(model.config, vocab_size=weight.shape[0], **overrides)
        draft = cls(
            config,
            seed=seed,
            device=weight.device,
            dtype=dtype or weight.dtype,
            draft_vocab=draft_vocab,
        )
        own = getattr(draft, "lm_head", None)
        if own is not None and not weight.is_meta:
            with torch.no_grad():
                columns = draft.columns()
                own.weight.copy_(weight if columns is None else weight[columns])
        return draft

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **overrides: Any,
    ) -> Self:
        """Read a checkpoint folder in the raw public form, or in that of the speculators package.

        Args:
            path: a folder with ``config.json`` and safetensors weights.
            device: None means the default device.
            dtype: None means that of the file, the widest where it has several.
            overrides: fields of the configuration that the file lacks or has wrong.

        Raises:
            ConfigError: a file, a tensor or a field is missing, unexpected or of the wrong size.
        """
        given = checkpoint.read_config(path)
        if speculators_form.is_speculators(given):
            given = speculators_form.to_raw(given, overrides)
        config = cls.config_class.from_dict(given, **overrides)
        tensors = cls.own_names(checkpoint.read_tensors(path))
        size = getattr(config, "draft_vocab_size", config.vocab_size)
        draft_vocab = read_map(config.family, tensors, size, config.vocab_size)
        tensors.pop("t2d", None)
        if draft_vocab is None:
            tensors.pop("d2t", None)
        if dtype is None:
            kinds = [t.dtype for t in tensors.values() if t.is_floating_point()]
            # one that holds them all: a single head kept in another type is no reason to round the rest
            dtype = reduce(torch.promote_types, kinds) if kinds else None
        draft = cls(config, device=device, dtype=dtype, draft_vocab=draft_vocab)
        if draft_vocab is not None:
            tensors["t2d"] = draft.get_buffer("t2d")
        own = draft.state_dict().keys()
        for name in SHARED:
            if name in tensors and name not in own:
                log.warning("the checkpoint's own %s is left out: the target's is used", name)
                del tensors[name]
        try:
            draft.load_state_dict(tensors)
        except RuntimeError as error:
            raise ConfigError(
                f"the weights in {path} do not fit its configuration: {error}"
            ) from error
        return draft

    def columns(self) -> Tensor | None:
        """int64 [V_d]: the target's ids of the draft's tokens; None where they are all of them, in order."""
        return None

    @classmethod
    def own_names(cls, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Rename what public files spell in another way."""
        return tensors

    def raw_config(self, dtype: torch.dtype) -> dict[str, Any]:
        """Write the configuration in the raw public form."""
        values: dict[str, Any] = self.config.to_dict(dtype)
        return values

    def save(self, path: str | Path) -> None:
        """Write a checkpoint folder in the raw public form."""
        dtype = next(self.parameters()).dtype
        checkpoint.write(path, self.raw_config(dtype), checkpoint_of(self))
