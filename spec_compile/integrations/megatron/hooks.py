"""Forward hooks that see each micro-batch once: taps go out, the final hidden state starts the draft."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .chunks import layer_modules

Tapped = Callable[[int, int, Tensor], None]
"""(chunk, layers passed, activations [s, b, D])."""
Finished = Callable[[Tensor], None]
"""(final hidden state [s, b, D])."""
Entered = Callable[[Mapping[str, Any]], None]
"""(keyword arguments of a chunk's decoder)."""


class ModelHooks:
    """Hooks on the tapped layers of a rank's chunks; they return nothing, so the model computes what it did.

    Activation recomputation runs layers again inside the backward; such calls are not seen.
    """

    def __init__(
        self,
        models: Sequence[Any],
        taps: Sequence[int],
        tapped: Tapped,
        finished: Finished,
        entered: Entered,
    ) -> None:
        self._handles: list[Any] = []
        for chunk, model in enumerate(models):
            before = _with_arguments(entered)
            self._handles.append(model.decoder.register_forward_pre_hook(before, with_kwargs=True))
            layers = layer_modules(model)
            for tap in sorted(set(taps)):
                self._hook(chunk, tap, layers, bool(model.pre_process), tapped)
            if model.post_process:
                handle = model.decoder.register_forward_hook(_outside_backward(finished))
                self._handles.append(handle)

    def _hook(
        self, chunk: int, tap: int, layers: Mapping[int, nn.Module], first: bool, tapped: Tapped
    ) -> None:
        if tap == 0 and first:

            def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                if not _in_backward():
                    tapped(chunk, 0, args[0] if args else kwargs["hidden_states"])

            self._handles.append(layers[1].register_forward_pre_hook(before, with_kwargs=True))
        elif tap in layers:
            hook = _outside_backward(lambda hidden: tapped(chunk, tap, hidden))
            self._handles.append(layers[tap].register_forward_hook(hook))

    def remove(self) -> None:
        """Take all hooks off; idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def taps_of(model: Any, taps: Sequence[int]) -> list[int]:
    """The taps that a chunk can give, ascending."""
    layers = layer_modules(model)
    return sorted({tap for tap in taps if tap in layers or (tap == 0 and model.pre_process)})


def _with_arguments(act: Entered) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        act(kwargs)

    return hook


def _outside_backward(act: Callable[[Tensor], None]) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        if not _in_backward():
            act(output[0] if isinstance(output, tuple) else output)

    return hook


def _in_backward() -> bool:
    """Whether the autograd engine runs this code: a recomputation, whatever its kind."""
    return bool(torch._C._current_graph_task_id() != -1)
