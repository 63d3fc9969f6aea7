"""Indexing expressions taken apart: what they do along the rows, and along everything else."""

from __future__ import annotations

from typing import Any

import torch

from .row_sizes import Position, position


def split_index(index: Any, ndim: int, dim: int) -> tuple[Any, tuple[Any, ...], int] | None:
    """Separate ``x[index]`` into its item at the row dimension and all else.

    Returns:
        The item, the index with that item replaced by ``:``, and the row dimension after it; None when the
        index holds more than ints, slices, ``None`` and ``...``.
    """
    items = list(index) if isinstance(index, tuple) else [index]
    if not all(i is None or i is ... or _is_plain(i) for i in items):
        return None
    taken = sum(i is not None and i is not ... for i in items)
    if ... in items:
        at = items.index(...)
        items[at : at + 1] = [slice(None)] * (ndim - taken)
    else:
        items += [slice(None)] * (ndim - taken)
    seen, result = 0, 0
    for i, item in enumerate(items):
        if item is None:
            result += 1
            continue
        if seen == dim:
            return item, (*items[:i], slice(None), *items[i + 1 :]), result
        seen += 1
        result += isinstance(item, slice)
    return None


def _is_plain(item: Any) -> bool:
    return isinstance(item, (int, torch.SymInt, slice)) and not isinstance(item, bool)


def bounds(item: slice, size: Position) -> tuple[Position, Position] | None:
    """First row and the one past the last of a slice of ``size`` rows; None when they are not fixed."""
    if item.step not in (None, 1):
        return None
    places: list[Position] = []
    for value, default in ((item.start, Position(0, 0)), (item.stop, size)):
        place = default if value is None else position(value)
        if place is None:
            return None
        if place.rows == 0 and place.offset < 0:
            place = size.moved(place)
        if place.rows > size.rows or (place.rows == size.rows and place.offset > size.offset):
            place = size  # behind the end, also 2**63 - 1 for "to the end"
        elif place.rows == 0 and size.rows and place.offset > 2**31:
            place = size
        places.append(place)
    return places[0], places[1]
