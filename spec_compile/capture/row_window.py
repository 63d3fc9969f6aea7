"""Rows cut out of the packed row: what a slice is until padding or joining makes it T rows again.

``x[1:]`` has T - 1 rows, for which no rank layout exists, and which export would forbid for small T. So
a slice is only remembered, as pieces; when they are T rows again they are a shift.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from spec_compile.errors import PlanError
from spec_compile.ir import ops
from spec_compile.ir.meta import user_line

from .row_constants import converted
from .row_index import bounds, split_index
from .row_sizes import Position

ADVICE = (
    "to look at other rows write sc.shift(x, k, document), torch.roll(x, k, 0), or a slice with as many rows "
    "padded or joined on as were cut off: F.pad(x[k:], ...), torch.cat([x[k:], zeros]), torch.cat([x[k:], x[:k]])"
)
START, END = Position(0, 0), Position(1, 0)
CASTS = ("to", "type", "float", "double", "half", "bfloat16", "long", "int", "bool", "contiguous",
         "clone", "detach", "type_as")  # fmt: skip

OPERATORS = (
    "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "mod", "pow", "rpow", "matmul",
    "rmatmul", "neg", "abs", "invert", "and", "rand", "or", "ror", "xor", "eq", "ne", "lt", "le", "gt", "ge", "len",
    "iter", "bool", "float", "int", "setitem", "iadd", "isub", "imul", "itruediv",
)  # fmt: skip


def refuse(what: str) -> NoReturn:
    """Refuse at the user's line that runs right now."""
    raise PlanError(f"{user_line()}\n  {what}; {ADVICE}")


def refuse_reading(name: str, window: RowWindow) -> NoReturn:
    """Refuse to read a part of the rows, at the line that reads it and the one that cut it."""
    here = user_line()
    cut = "" if window.made_at == here else f" (cut at {window.made_at})"
    raise PlanError(f"{here}\n  {name} reads a part of the rows{cut}; {ADVICE}")


@dataclass(frozen=True)
class Cut:
    """Rows ``start`` to ``stop`` of the source."""

    start: Position
    stop: Position

    @property
    def size(self) -> Position:
        """How many rows these are."""
        return self.stop.moved(self.start, -1)


@dataclass(frozen=True)
class Fill:
    """Rows of one constant."""

    count: int
    value: float

    @property
    def size(self) -> Position:
        """How many rows these are."""
        return Position(0, self.count)


Piece = Cut | Fill


@dataclass(frozen=True)
class Source:
    """A tensor of T rows at ``dim``; ``base[index]`` unless the index takes everything."""

    base: Tensor
    index: tuple[Any, ...]
    dim: int

    def tensor(self) -> Tensor:
        """The tensor itself."""
        plain = all(item == slice(None) for item in self.index)
        return self.base if plain else self.base[self.index]

    def same(self, other: Source) -> bool:
        """Whether both name the same values."""
        return (
            self.base is other.base
            and self.dim == other.dim
            and _without_tail(self.index) == _without_tail(other.index)
        )


def _without_tail(index: tuple[Any, ...]) -> tuple[Any, ...]:
    while index and index[-1] == slice(None):
        index = index[:-1]
    return index


class RowWindow:
    """Pieces of one source, in order; a stand-in for a tensor until they are T rows again."""

    def __init__(self, source: Source, pieces: tuple[Piece, ...]) -> None:
        self.source = source
        self.pieces = tuple(p for p in pieces if p.size != START)
        self.made_at = user_line()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        refuse(f"{getattr(func, '__name__', func)} reads a part of the rows outside capture")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in CASTS:
            return lambda *args, **kwargs: self.map(lambda x: getattr(x, name)(*args, **kwargs))
        if name in ("dtype", "device", "ndim", "new_zeros", "new_full", "new_ones"):
            return getattr(self.source.tensor(), name)
        refuse_reading(f".{name}", self)

    @property
    def size_in_rows(self) -> Position:
        """How many rows all pieces are."""
        total = START
        for piece in self.pieces:
            total = total.moved(piece.size)
        return total

    @property
    def shape(self) -> torch.Size:
        """Sizes, as of the tensor that this stands for."""
        x, (rows, offset) = self.source.tensor(), self.size_in_rows
        sizes = list(x.shape)
        sizes[self.source.dim] = sizes[self.source.dim] + offset if rows else offset
        return torch.Size(sizes)

    def size(self, dim: int | None = None) -> Any:
        """Tensor.size."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """Tensor.dim."""
        return self.source.tensor().ndim

    def map(self, fn: Callable[[Tensor], Tensor], dim: int | None = None) -> RowWindow:
        """Apply a cast or an index to the source, after which its rows lie at ``dim``."""
        changed = fn(self.source.tensor())
        pieces = tuple(
            Fill(p.count, fill_value(p.value, changed.dtype)) if isinstance(p, Fill) else p
            for p in self.pieces
        )
        return RowWindow(Source(changed, (), self.source.dim if dim is None else dim), pieces)

    def __getitem__(self, index: Any) -> RowWindow | Tensor:
        parts = split_index(index, self.dim(), self.source.dim)
        if parts is None or not isinstance(parts[0], slice):
            refuse("takes some of the rows")
        item, rest, dim = parts
        window = self
        if any(other != slice(None) for other in rest):
            window = self.map(lambda x: x[rest], dim)
        return window.cut(item).settled()

    def cut(self, item: slice) -> RowWindow:
        """Some of these rows, without settling them."""
        places = bounds(item, self.size_in_rows)
        if places is None:
            refuse(
                "takes rows that no fixed numbers name: every second one, or up to a computed one"
            )
        start, stop = places
        if len(self.pieces) == 1 and isinstance(self.pieces[0], Cut):
            first = self.pieces[0].start
            return RowWindow(self.source, (Cut(first.moved(start), first.moved(stop)),))
        back = self.size_in_rows.moved(stop, -1)
        if start.rows or back.rows:
            refuse("cuts rows that were joined before in a way that is not recognised")
        pieces = _drop(list(self.pieces), start.offset)
        pieces = _drop(pieces[::-1], back.offset, behind=True)[::-1]
        return RowWindow(self.source, tuple(pieces))

    def settled(self) -> RowWindow | Tensor:
        """The shift that T rows of pieces are; the window itself while they are fewer or more."""
        if self.size_in_rows != END:
            return self
        moves = _moves(self.pieces)
        if moves is None:
            refuse("puts rows together in another order than a shift by a fixed number")
        x, dim = self.source.tensor(), self.source.dim
        return shifted(x, dim, moves)


def _refused(name: str) -> Any:
    def method(self: RowWindow, *args: Any) -> Any:
        refuse_reading(name, self)

    return method


for _name in OPERATORS:
    setattr(RowWindow, f"__{_name}__", _refused(_name))


def fill_value(value: float, dtype: torch.dtype) -> float:
    """A constant as a type holds it, or a refusal."""
    held = converted(value, dtype)
    if held is None:
        refuse(f"joins rows with {value}, which {dtype} does not hold exactly")
    return held


def shifted(x: Tensor, dim: int, moves: list[tuple[int, str, float]]) -> Tensor:
    """Apply row shifts one after the other."""
    y = x if dim == 0 else x.movedim(dim, 0)
    for k, ends, value in moves:
        y = ops.declared_row_shift(y, k, ends, value)
    return y if dim == 0 else y.movedim(0, dim)


def _drop(pieces: list[Piece], count: int, *, behind: bool = False) -> list[Piece]:
    """Take rows off the first piece and on; ``behind``: the list runs backwards, rows go from the ends."""
    rest = list(pieces)
    while count and rest:
        piece = rest.pop(0)
        if piece.size.rows == 0 and piece.size.offset <= count:
            count -= piece.size.offset
        elif isinstance(piece, Fill):
            return [replace(piece, count=piece.count - count), *rest]
        elif behind:
            return [replace(piece, stop=piece.stop.moved(Position(0, -count))), *rest]
        else:
            return [replace(piece, start=piece.start.moved(Position(0, count))), *rest]
    return rest


def _moves(pieces: tuple[Piece, ...]) -> list[tuple[int, str, float]] | None:
    """Shifts that give T rows of pieces, or None."""
    cuts = [p for p in pieces if isinstance(p, Cut)]
    fills = [p for p in pieces if isinstance(p, Fill)]
    if len(cuts) == 2 and not fills:
        a, b = cuts
        if (a.stop, b.start) == (END, START) and a.start == b.stop:  # x[k:], x[:k]
            at = a.start
            return [(at.offset, "join", 0.0)]
        return None
    if len(cuts) != 1 or len({f.value for f in fills}) > 1:
        return None
    (body,) = cuts
    if body.start.rows or body.stop.rows != 1 or body.start.offset < 0 or body.stop.offset > 0:
        return None
    before = sum(p.size.offset for p in pieces[: pieces.index(body)])
    value = fills[0].value if fills else 0.0
    skip, drop = body.start.offset, -body.stop.offset
    behind = skip + drop - before
    if (before, drop) == (0, 0):
        return [(skip, "fill", value)] if skip else []
    if (skip, behind) == (0, 0):
        return [(-drop, "fill", value)]
    # push what is not wanted over each end, and back
    steps = [(-drop, "fill", value), (drop + skip, "fill", value), (-before, "fill", value)]
    return [step for step in steps if step[0]]
