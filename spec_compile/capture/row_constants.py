"""Which traced tensors hold one constant everywhere: what may be joined to rows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

FACTORIES: dict[Any, float] = {
    torch.zeros: 0.0, torch.zeros_like: 0.0, Tensor.new_zeros: 0.0,
    torch.ones: 1.0, torch.ones_like: 1.0, Tensor.new_ones: 1.0,
}  # fmt: skip
FILLED = {torch.full: 1, torch.full_like: 1, Tensor.new_full: 2}
"""Factories that are given their value, and its place among the arguments."""
COPIES = {
    Tensor.to, Tensor.type, Tensor.type_as, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.long,
    Tensor.int, Tensor.bool, Tensor.clone, torch.clone, Tensor.contiguous, Tensor.repeat,
}  # fmt: skip
ROUNDED: dict[torch.dtype, type[np.floating[Any]]] = {
    torch.float32: np.float32,
    torch.float16: np.float16,
}
EXACT_INTEGERS = 256
"""Every float type holds integers up to here."""


def converted(value: float, dtype: torch.dtype) -> float | None:
    """What a tensor of a type holds of a constant; None when that is not worked out here."""
    if dtype == torch.bool:
        return float(bool(value))
    if dtype == torch.float64:
        return value
    if dtype in ROUNDED:
        return float(ROUNDED[dtype](value))
    if not dtype.is_floating_point:
        return float(int(value)) if math.isfinite(value) else None
    exact = not math.isfinite(value) or (value == int(value) and abs(value) <= EXACT_INTEGERS)
    return value if exact else None


class Constants:
    """Constants by the memory they lie in, so that their views are constants too, until something writes there."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[Any, float]] = {}

    def value(self, x: Tensor) -> float | None:
        """The constant that a tensor holds, or None."""
        found = self._held.get(_memory(x))
        return None if found is None else found[1]

    def add(self, x: Tensor, value: float) -> None:
        """Remember a constant; its memory is held, so that no other tensor takes its place."""
        held = converted(value, x.dtype)
        if held is not None:
            self._held[_memory(x)] = (x, held)

    def watch(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Learn from a call that ran."""
        name = getattr(func, "__name__", "")
        if _writes(name) or "out" in kwargs:
            for written in (args[0] if args else None, kwargs.get("out")):
                if isinstance(written, Tensor):
                    self._held.pop(_memory(written), None)
            return
        if not isinstance(result, Tensor):
            return
        value = self._made(func, args, kwargs)
        if value is not None:
            self.add(result, value)

    def _made(self, func: Any, args: Any, kwargs: Any) -> float | None:
        if func in FACTORIES:
            return FACTORIES[func]
        if func in FILLED:
            at = FILLED[func]
            value = args[at] if len(args) > at else kwargs.get("fill_value")
            return float(value) if isinstance(value, (int, float)) else None
        if func in COPIES and args and isinstance(args[0], Tensor):
            return self.value(args[0])
        return None


READS = ("__index__", "__invert__", "__int__")


def _writes(name: str) -> bool:
    if not name.startswith("__"):
        return name.endswith("_")
    return name == "__setitem__" or (name.startswith("__i") and name not in READS)


def _memory(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)
