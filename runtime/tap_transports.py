"""The transports of tap channels by the name that `Plan.tap_transport` gives them."""

from __future__ import annotations

import importlib

from spec_compile.errors import ConfigError

from .tap_transport import Setting, TapTransport

_CLASSES = {
    "loopback": ("loopback", "Loopback"),
    "shm": ("shared_memory", "SharedMemory"),
    "c10d": ("c10d_taps", "C10dTaps"),
    "nixl": ("nixl_taps", "NixlTaps"),
    "cuda_ipc": ("cuda_ipc_taps", "CudaIpcTaps"),
}
"""Module next to this one, and class. Imported when used: some need packages that others lack."""


def transport_names() -> tuple[str, ...]:
    """All that `open_transport` takes."""
    return tuple(_CLASSES)


def open_transport(name: str, setting: Setting) -> TapTransport:
    """Build a transport for this rank.

    Raises:
        ConfigError: The name is unknown, or a package that it needs is not installed.
    """
    if name not in _CLASSES:
        raise ConfigError(f"expected tap transport auto or one of {list(_CLASSES)}, found {name!r}")
    module, kind = _CLASSES[name]
    found: TapTransport = getattr(importlib.import_module(f".{module}", __package__), kind)(setting)
    return found
