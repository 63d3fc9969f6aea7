"""Python numbers and lists from what callers pass for them: their own, numpy's and torch's."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Mapping
from typing import Any


def whole(value: Any) -> int:
    """Give an int for an int of any library.

    Raises:
        TypeError: it is none; bools are none.
    """
    if type(value) is int:
        return value
    value = _unwrapped(value)
    if isinstance(value, bool):
        raise TypeError("a bool is not a number")
    return operator.index(value)


def real(value: Any) -> float:
    """Give a float for a real number of any library.

    Raises:
        TypeError: it is none; bools are none.
        OverflowError: it is an int beyond all floats.
    """
    value = _unwrapped(value)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{type(value).__name__} is not a real number")
    return float(value)


def listed(value: Any) -> list[Any]:
    """Give the items of a list, tuple, range, array or tensor.

    Raises:
        TypeError: it has no order, can be read only once, or is a text.
    """
    if isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__getitem__"):
        raise TypeError(f"found {type(value).__name__}")
    return list(value)


def _unwrapped(value: Any) -> Any:
    """Take the scalar out of numpy's scalars and of arrays and tensors without dimensions."""
    dimensions = getattr(value, "ndim", None)
    if dimensions is None:
        return value
    if dimensions:
        raise TypeError(f"expected one number, found an array of {dimensions} dimensions")
    return value.item()
