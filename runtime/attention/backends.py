"""All attention backends, and the choice among them; `interface` declares what each must do."""

from __future__ import annotations

import torch

from spec_compile.errors import ConfigError

from .aten_cpu import AtenCpu
from .cudnn import Cudnn
from .flash import AtenFlash
from .flash_packages import FlashAttention2, FlashAttention3, FlashAttention4
from .generated import Generated
from .interface import Backend, fallbacks, record_fallback
from .probe import probe
from .products import Math

__all__ = ["BACKENDS", "Backend", "backend_for", "fallbacks", "record_fallback"]


_FASTEST_FIRST: tuple[Backend, ...] = (
    Cudnn(), FlashAttention3(), FlashAttention4(), Generated(), FlashAttention2(), AtenFlash(),
    AtenCpu(), Math(),
)  # fmt: skip
"""Plain products, which always serve, last."""

BACKENDS: dict[str, Backend] = {backend.name: backend for backend in _FASTEST_FIRST}


def backend_for(
    device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int, requested: str = "auto"
) -> str:
    """Name the backend that serves these tensors, after a probe of its kernels on a small case.

    Args:
        device: where the tensors live.
        dtype: of q, k and v.
        head_dim: of queries and keys.
        value_dim: head dim of the values.
        requested: "auto", or the name of the backend that must serve.

    Raises:
        ConfigError: the requested backend is unknown or cannot serve.
    """
    device = torch.device(device)
    if requested != "auto":
        if requested not in BACKENDS:
            raise ConfigError(
                f"attention must be 'auto' or one of {', '.join(BACKENDS)}, found {requested!r}"
            )
        reason = _limit(BACKENDS[requested], device, dtype, head_dim, value_dim)
        if reason is not None:
            raise ConfigError(
                f"attention backend {requested!r} cannot serve: {reason}; use attention='auto'"
            )
        return requested
    for name, backend in BACKENDS.items():
        if not _meant_for(backend, device):
            continue
        reason = _limit(backend, device, dtype, head_dim, value_dim)
        if reason is None:
            return name
        record_fallback(f"attention backend {name!r} is not used: {reason}")
    raise ConfigError(f"no attention backend takes {dtype} on {device.type}; use a floating dtype")


def _meant_for(backend: Backend, device: torch.device) -> bool:
    """Whether "auto" tries it there: the interpreter is for tests, packages are extras."""
    if not getattr(backend, "installed", True):
        return False
    if isinstance(backend, Generated):
        return device.type == "cuda"
    return backend.device_type in (None, device.type)


def _limit(
    backend: Backend, device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int
) -> str | None:
    if backend.device_type not in (None, device.type):
        return f"it runs on {backend.device_type}, the tensors are on {device.type}"
    if device.type == "cuda" and not torch.cuda.is_available():
        return None if isinstance(backend, Math) else "no CUDA device is present"
    reason = backend.limit(device, dtype, head_dim, value_dim)
    if reason is None and not isinstance(backend, Math):
        reason = probe(backend, device, dtype, head_dim, value_dim)
    return reason
