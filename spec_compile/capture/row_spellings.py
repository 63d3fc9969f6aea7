"""Recognise plain PyTorch spellings of a shift of rows while a draft is traced: roll, slice and pad, slice and cat."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from .row_constants import Constants
from .row_index import bounds, split_index
from .row_sizes import row_dim
from .row_window import (
    END,
    START,
    Cut,
    Fill,
    Piece,
    RowWindow,
    Source,
    fill_value,
    refuse,
    refuse_reading,
    shifted,
)

Joined = Sequence[Any]


class RowSpellings(TorchFunctionMode):
    """Turn a fixed shift of all rows into one `row_shift`, and refuse other parts of the rows with their line."""

    def __init__(self) -> None:
        super().__init__()
        self.constants = Constants()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        handler = HANDLERS.get(func)
        if handler is not None:
            result = handler(self, *args, **kwargs)
            if result is not NotImplemented:
                return result
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, RowWindow):
                refuse_reading(getattr(func, "__name__", str(func)), leaf)
        result = func(*args, **kwargs)
        self.constants.watch(func, args, kwargs, result)
        return result

    def index(self, x: Any, index: Any) -> Any:
        """``x[index]``."""
        dim = _row_dim(x)
        parts = None if dim is None else split_index(index, x.ndim, dim)
        if parts is None or isinstance(x, RowWindow):
            return NotImplemented if isinstance(x, Tensor) else x[index]
        item, rest, dim = parts
        if not isinstance(item, slice):
            refuse("takes one row")
        if bounds(item, END) == (START, END):
            return NotImplemented
        window = RowWindow(Source(x, rest, dim), (Cut(START, END),))
        return window.cut(item).settled()

    def narrow(self, x: Any, dim: int, start: Any, length: Any) -> Any:
        """``x.narrow(dim, start, length)``."""
        along = _row_dim(x)
        if along is None or dim % x.ndim != along:
            return NotImplemented
        return self.index(x, (*[slice(None)] * along, slice(start, start + length)))

    def pad(self, x: Any, pad: Any, mode: str = "constant", value: float | None = None) -> Any:
        """``F.pad``: constants before and behind; negative sizes cut rows off."""
        dim = _row_dim(x)
        at = None if dim is None else 2 * (x.ndim - 1 - dim)
        if at is None or all(size == 0 for size in pad[at : at + 2]):
            return NotImplemented
        if mode != "constant" or not all(type(size) is int for size in pad[at : at + 2]):
            refuse("pads rows by something else than a constant, or by a number that is not fixed")
        before, behind = pad[at : at + 2]
        others = [*pad[:at], 0, 0, *pad[at + 2 :]]
        fill = 0.0 if value is None else float(value)
        window = x if isinstance(x, RowWindow) else _whole(x)
        if any(others):
            window = window.map(lambda source: F.pad(source, others, mode, value))
        window = window.cut(slice(max(-before, 0), -max(-behind, 0) or None))
        fill = fill_value(fill, window.source.tensor().dtype)
        pieces = (Fill(max(before, 0), fill), *window.pieces, Fill(max(behind, 0), fill))
        return RowWindow(window.source, pieces).settled()

    def cat(self, tensors: Joined, dim: int = 0, *, axis: int | None = None) -> Any:
        """``torch.cat`` of rows with constants or with rows of the same tensor."""
        dim = dim if axis is None else axis
        tensors = [t for t in tensors if not (isinstance(t, Tensor) and tuple(t.shape) == (0,))]
        if any(_is_joined(t, dim) for t in tensors):
            return NotImplemented
        along = [
            isinstance(t, (Tensor, RowWindow)) and _row_dim(t) == dim % t.ndim for t in tensors
        ]
        if not any(along) or all(
            a and isinstance(t, Tensor) for a, t in zip(along, tensors, strict=True)
        ):
            return NotImplemented
        parts = [
            t if isinstance(t, RowWindow) else _whole(t) if a else t
            for a, t in zip(along, tensors, strict=True)
        ]
        parts = [self._constant_rows(part) for part in parts]
        sources = [part.source for part in parts if isinstance(part, RowWindow)]
        if not sources or not all(sources[0].same(other) for other in sources):
            refuse("joins rows of different tensors")
        pieces: list[Piece] = []
        for part in parts:
            pieces += part.pieces if isinstance(part, RowWindow) else [self._fill(part, sources[0])]
        dtype, joined = _joint_type(tensors), RowWindow(sources[0], tuple(pieces))
        if joined.size_in_rows != END and sum(isinstance(piece, Cut) for piece in pieces) > 1:
            refuse("joins more or fewer rows than were cut off")
        if dtype != sources[0].tensor().dtype:
            joined = joined.map(lambda x: x.to(dtype))
        return joined.settled()

    def _constant_rows(self, part: Any) -> Any:
        """A fixed number of rows of a constant as a constant; anything else as it is."""
        if not isinstance(part, RowWindow) or part.size_in_rows.rows:
            return part
        value = self.constants.value(part.source.base)
        if value is None:
            return part
        made = part.source.tensor().new_full(part.shape, value)
        self.constants.add(made, value)
        return made

    def _fill(self, part: Any, source: Source) -> Fill:
        value = self.constants.value(part) if isinstance(part, Tensor) else None
        if value is None:
            refuse(
                "joins rows with values that are not known to be one constant; make them with new_zeros, "
                "new_full, torch.zeros or torch.full, or write torch.where(first_row, value, shifted)"
            )
        wanted, found = list(source.tensor().shape), list(part.shape)
        count = found.pop(source.dim) if len(found) == len(wanted) else None
        wanted.pop(source.dim)
        if type(count) is not int or found != wanted:
            refuse(f"joins rows with a constant of shape {tuple(part.shape)}, which does not fit")
        return Fill(count, value)

    def roll(self, x: Any, shifts: Any, dims: Any = ()) -> Any:
        """``torch.roll``."""
        dim = _row_dim(x)
        if dim is None:
            return NotImplemented
        steps = list(shifts) if isinstance(shifts, (tuple, list)) else [shifts]
        along = [dims] if isinstance(dims, int) else list(dims or ())
        along = [d % x.ndim for d in along] or ([0] if x.ndim == 1 else [])
        if not along:
            refuse("moves values over all dimensions at once, rows included; give it dims")
        if dim not in along:
            return NotImplemented
        if isinstance(x, RowWindow) or len(steps) != len(along):
            refuse("rolls a part of the rows")
        for k, d in zip(steps, along, strict=True):
            if d != dim:
                x = torch.roll(x, k, d)
            elif type(k) is int:
                x = shifted(x, dim, [(-k, "roll", 0.0)])
            else:
                refuse("rolls rows by a number that is not a fixed int")
        return x

    def zeros_like(self, x: Any, **options: Any) -> Any:
        """``torch.zeros_like`` of a fixed number of rows."""
        if not isinstance(x, RowWindow) or x.size_in_rows.rows:
            return NotImplemented
        made = torch.zeros(x.shape, **{"dtype": x.dtype, "device": x.device, **options})
        self.constants.add(made, 0.0)
        return made


def _row_dim(x: Any) -> int | None:
    if isinstance(x, RowWindow):
        return x.source.dim
    return row_dim(x) if isinstance(x, Tensor) else None


def _whole(x: Tensor) -> RowWindow:
    dim = row_dim(x)
    assert dim is not None
    return RowWindow(Source(x, (), dim), (Cut(START, END),))


def _is_joined(x: Any, dim: int) -> bool:
    """Whether a value has more than one run of rows in a dimension: keys of several steps, or slots of anchors."""
    if not isinstance(x, Tensor) or row_dim(x) == dim % x.ndim:
        return False
    return isinstance(x.shape[dim], torch.SymInt)


def _joint_type(tensors: Joined) -> torch.dtype:
    dtype: torch.dtype = tensors[0].dtype
    for t in tensors[1:]:
        dtype = torch.promote_types(dtype, t.dtype)
    return dtype


def _refused(name: str, at: int, default: int) -> Callable[..., Any]:
    def handler(mode: RowSpellings, x: Any, *args: Any, dim: int | None = None, **_: Any) -> Any:
        found = dim if dim is not None else args[at] if len(args) > at else default
        if isinstance(x, RowWindow):
            refuse_reading(name, x)
        if (
            isinstance(x, Tensor)
            and isinstance(found, int)
            and row_dim(x) == found % max(x.ndim, 1)
        ):
            refuse(f"{name} takes some of the rows")
        return NotImplemented

    return handler


def _handlers() -> dict[Any, Callable[..., Any]]:
    table: dict[Any, Callable[..., Any]] = {}
    families: list[tuple[Callable[..., Any], list[Any]]] = [
        (RowSpellings.index, [Tensor.__getitem__]),
        (RowSpellings.narrow, [Tensor.narrow, torch.narrow]),
        (RowSpellings.pad, [F.pad, torch._C._nn.pad, torch.constant_pad_nd]),
        (RowSpellings.cat, [torch.cat, torch.concat, torch.concatenate]),
        (RowSpellings.roll, [Tensor.roll, torch.roll]),
        (RowSpellings.zeros_like, [torch.zeros_like]),
    ]
    families += [
        (_refused(name, 1, 0), [getattr(Tensor, name), getattr(torch, name)])
        for name in ("split", "chunk", "tensor_split", "split_with_sizes")
    ]
    families.append((_refused("unfold", 0, 0), [Tensor.unfold]))
    families.append((_refused("select", 0, 0), [Tensor.select, torch.select]))
    for handler, functions in families:
        table.update(dict.fromkeys(functions, handler))
    return table


HANDLERS = _handlers()
