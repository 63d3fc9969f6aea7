"""The caller's thread-wide modes: a call of a bound model runs the same under all of them, or refuses."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from spec_compile.errors import ConfigError


@contextlib.contextmanager
def own_modes(
    device: torch.device, grad: bool | None, *, deterministic: bool = False
) -> Iterator[None]:
    """Run a call in its own precision and gradient mode, whatever surrounds it.

    Autocast is off: a plan's ``param_dtype`` says in which type models compute, and log-probs of two calls
    must not differ by their surroundings.

    Args:
        device: the model's.
        grad: whether gradients are recorded; None keeps the caller's choice.
        deterministic: take kernels that add in a fixed order; torch warns where it has none.
    """
    with contextlib.ExitStack() as stack:
        for kind in sorted({"cpu", device.type}):
            stack.enter_context(torch.autocast(kind, enabled=False))
        if torch.is_inference_mode_enabled():  # buffers made here are written in later calls
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        if deterministic:
            stack.enter_context(_deterministic())
        if grad is not None:
            stack.enter_context(torch.set_grad_enabled(grad))
        yield


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=warns or not before)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)


def inference_refusal(call: str) -> ConfigError | None:
    """The error of a call that needs gradients under ``torch.inference_mode()``; None outside."""
    if not torch.is_inference_mode_enabled():
        return None
    return ConfigError(
        f"{call} needs gradients, which torch.inference_mode() rules out for all tensors made inside; call it outside "
        "(step works under torch.no_grad())"
    )
