"""The engine's own copy of a target: packed new rows in, hidden states, features and logits out."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spec_compile.capture.target import TargetView
from spec_compile.errors import CaptureError, ConfigError

from . import attention
from .cache import KVCache, PackedRows

SERVED_LAYERS = {"full_attention", "sliding_attention"}
UNSERVED_ROPE = ("dynamic", "longrope")
"""RoPE whose frequencies follow the highest position of a call, and so the other sequences in it."""


def own_copy(module: nn.Module) -> tuple[nn.Module, bool]:
    """Copy a module for serving; parameters on the meta device become empty ones.

    Returns:
        The copy, in eval mode and without gradients, and whether all its weights are there.

    Raises:
        ConfigError: the module cannot be copied, lacks a buffer that no update brings, or has a RoPE that
            changes with what shares the batch.
    """
    name = type(module).__name__
    _check_rope(module)
    try:
        with torch.no_grad():
            mine = copy.deepcopy(module)
    except Exception as error:
        raise ConfigError(
            f"{name} could not be copied ({error}); a model may hold parameters, buffers and plain values only"
        ) from error
    mine.eval().requires_grad_(False)
    real = [t for t in (*mine.parameters(), *mine.buffers()) if not t.is_meta]
    device = real[0].device if real else torch.get_default_device()
    sent = set(mine.state_dict())
    for path, buffer in mine.named_buffers():
        if buffer.is_meta and path not in sent:
            raise ConfigError(
                f"{name}: buffer {path} is on the meta device and in no checkpoint; build the model "
                "with real buffers (only parameters may be on meta)"
            )
    complete = True
    for owner in mine.modules():
        for table in (owner._parameters, owner._buffers):
            for value in table.values():
                if value is not None and value.is_meta:
                    complete = False
    if not complete:
        _materialise(mine, device)
    return mine, complete


def _check_rope(module: nn.Module) -> None:
    """Refuse what transformers' dynamic_rope_update would update."""
    for path, owner in module.named_modules():
        found = getattr(owner, "rope_type", None)
        for kind in found.values() if isinstance(found, dict) else (found,):
            if isinstance(kind, str) and any(word in kind for word in UNSERVED_ROPE):
                raise ConfigError(
                    f"{type(module).__name__}: {path} has rope_type={kind!r}, whose frequencies depend on the "
                    "longest sequence of a batch; the engine serves types with fixed frequencies (default, "
                    "linear, llama3, yarn)"
                )


def _materialise(module: nn.Module, device: torch.device) -> None:
    """Replace meta tensors by empty ones; tied ones stay tied."""
    made: dict[int, Tensor] = {}
    for owner in module.modules():
        for table in (owner._parameters, owner._buffers):
            for leaf, value in table.items():
                if value is None or not value.is_meta:
                    continue
                if id(value) not in made:
                    empty = torch.empty_like(value, device=device)
                    made[id(value)] = (
                        nn.Parameter(empty, requires_grad=False)
                        if isinstance(value, nn.Parameter)
                        else empty
                    )
                table[leaf] = made[id(value)]  # type: ignore[assignment]


class ServedTarget:
    """Runs packed rows of a transformers causal language model over the engine's cache."""

    def __init__(
        self, target: nn.Module, taps: tuple[int, ...], *, hidden_too: bool = False
    ) -> None:
        """Copy a target.

        Args:
            target: a transformers causal language model.
            taps: layers whose inputs are the first features.
            hidden_too: the hidden states after the final norm are the last features.

        Raises:
            ConfigError: it cannot be served; says what it lacks.
        """
        self.model, self.complete = own_copy(target)
        try:
            self._view = TargetView.of(self.model)
        except CaptureError as error:
            raise ConfigError(f"the engine cannot serve this target: {error}") from error
        model: Any = self.model
        self.config = model.config.get_text_config()
        kinds = set(getattr(self.config, "layer_types", None) or ()) - SERVED_LAYERS
        if kinds:
            raise ConfigError(
                f"{type(target).__name__} has layers of type {', '.join(sorted(kinds))}; the engine's "
                "cache serves full and sliding-window attention only"
            )
        for tap in taps:
            if isinstance(tap, bool) or not isinstance(tap, int) or not 0 <= tap < self.num_layers:
                raise ConfigError(
                    f"the draft's tap {tap!r} does not exist; expected 0 to {self.num_layers - 1} in a "
                    f"target of {self.num_layers} layers"
                )
        readable, written = (len(m.weight) for m in (self._view.embedding, self._view.head))
        if written > readable:
            raise ConfigError(
                f"{type(target).__name__} can sample {written} tokens but embed only {readable}; resize its embeddings"
            )
        attention.install(self.model)
        self.cache = KVCache()
        self._taps, self._hidden_too = taps, hidden_too
        self._tapped: dict[int, Tensor] = {}
        for tap in set(taps):
            self._view.layers[tap].register_forward_pre_hook(
                partial(_keep, self._tapped, tap), with_kwargs=True
            )

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return self._view.num_layers

    @property
    def device(self) -> torch.device:
        """Where the embedding lies."""
        return self._view.embedding.weight.device

    @property
    def vocab_size(self) -> int:
        """Tokens that can be sampled."""
        return self._view.head.weight.shape[0]

    @property
    def num_embeddings(self) -> int:
        """Tokens that can be read."""
        return self._view.embedding.weight.shape[0]

    def run(self, tokens: Tensor, rows: PackedRows, last_position: int) -> tuple[Tensor, Tensor]:
        """Forward new rows.

        Args:
            tokens: int64 [T].
            rows: whose they are.
            last_position: the highest that the model is asked for; later rows, which nobody will
                look at, are given this one.

        Returns:
            Hidden states after the final norm [T, D], and features [T, m * D].
        """
        self.cache.reserve(*rows.room)
        with attention.cached_call(self.cache, rows) as call:
            hidden = self._view.run(tokens, rows.position.clamp_max(last_position))
        if call.layers != set(range(self.num_layers)):
            raise ConfigError(
                f"{type(self.model).__name__}: layers {sorted(set(range(self.num_layers)) - call.layers)} did not "
                "attend through transformers' attention interface, so the engine cannot cache them"
            )
        parts = [self._tapped[tap] for tap in self._taps]
        self._tapped.clear()
        parts += [hidden] if self._hidden_too else []
        return hidden, torch.cat(parts, -1) if parts else hidden[:, :0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [R, V] of hidden states [R, D], also of a draft in another dtype."""
        return F.linear(hidden, self._view.head.weight.to(hidden.dtype))

    def embed(self, ids: Tensor) -> Tensor:
        """Rows of the input embedding weight, without scale: what drafts read."""
        return F.embedding(ids, self._view.embedding.weight)


def _keep(
    tapped: dict[int, Tensor],
    tap: int,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Keep a layer's input; the dictionary is an argument, so that a copied engine fills its own."""
    hidden: Tensor = args[0] if args else kwargs["hidden_states"]
    tapped[tap] = hidden[0]
