"""Whether Triton kernels can run here, and how."""

from __future__ import annotations

import functools


def triton_mode(device_type: str) -> str | None:
    """Return "triton" on a GPU, "triton-interpreted" in the interpreter, None where neither works.

    The interpreter runs only if TRITON_INTERPRET=1 was set before triton was first imported.

    Args:
        device_type: such as "cpu" or "cuda".
    """
    interpreted = is_interpreted()
    if interpreted is None:
        return None
    if interpreted:
        return "triton-interpreted"
    return "triton" if device_type in ("cuda", "xpu") else None


@functools.cache
def is_interpreted() -> bool | None:
    """True when triton was imported for interpretation; None when it is not installed."""
    try:
        import triton.language as tl
        from triton.runtime.interpreter import InterpretedFunction
    except ImportError:
        return None
    # the variable itself may have changed since; triton's own functions show what held at import
    return isinstance(tl.cdiv, InterpretedFunction)
