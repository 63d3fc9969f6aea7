"""Gradients that come in parts: each kernel's share of the rows, added up once and put in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from spec_compile.codegen.kernel import dtype_name
from spec_compile.codegen.sum_parts import SumShape, launch_sum
from spec_compile.codegen.triton_mode import triton_mode
from spec_compile.ir.dtypes import accumulator

PARTS_AT_ONCE = 8
"""How many parts one launch adds up."""
MOST_SEEN = 0.5
"""Up to this share of rows with a gradient, it is cheaper to add it to zeros than to write a part of all rows."""
LEAST_ROWS = 1 << 14
"""Rows of parts that are added up before all have come, where no later part reaches into theirs."""


class Part(NamedTuple):
    """A gradient over neighbouring rows; other rows get nothing from it."""

    first: int
    grad: Tensor
    """[m, H, D]."""


class Sum:
    """A gradient whose parts come one after the other; few are held at a time.

    Args:
        like: [n, H, D]: shape, dtype and device of the result.
        dtype: of the running sum; None for that of ``like``.
        places: see `add_up`.
        total: a running sum to go on with, contiguous; it is changed in place.
    """

    def __init__(
        self, like: Tensor, *, dtype: torch.dtype | None = None, places: Tensor | None = None,
        total: Tensor | None = None,
    ) -> None:  # fmt: skip
        self._like, self._places, self._total = like, places, total
        self._dtype = like.dtype if dtype is None else dtype
        self._parts: list[Part] = []
        self._rows, self._end = 0, 0

    def add(self, first: int, grad: Tensor) -> None:
        """Take a part over the rows from ``first`` on; it may be kept as it is."""
        beyond = self._rows >= LEAST_ROWS and first >= self._end
        if self._parts and (beyond or self._rows >= len(self._like)):
            self.settle()
        self._parts.append(Part(first, grad))
        self._rows += len(grad)
        self._end = max(self._end, first + len(grad))

    def result(self) -> Tensor:
        """The sum, in the dtype of ``like``."""
        if self._total is None:
            return add_up(self._parts, self._like, places=self._places)
        self.settle()
        return self._total.to(self._like.dtype)

    def onto(self, total: Tensor) -> Tensor:
        """Add the sum to ``total``, contiguous, in place."""
        if self._total is not None:
            self.settle()
            total += self._total
        elif self._parts:
            _add_onto(self._parts, total, self._places)
        return total

    def in_place_pays(self, seen_share: float) -> bool:
        """Whether to add right to `running`, rather than take a part over all rows of which so many are not 0."""
        if self._places is not None:
            return False
        # a sum in another dtype than its result's is most often added to one that comes later: no zeros for it
        pays = self._dtype == self._like.dtype and seen_share <= MOST_SEEN
        return self._total is not None or pays

    def running(self) -> Tensor:
        """The running sum, contiguous, to add to in place; parts that are held still are not in it."""
        if self._total is None:
            self._total = zeros(self._like, self._dtype)
        return self._total

    def settle(self, *, keep: int = 0) -> None:
        """Add the parts so far to the running sum, and keep none; nothing while they have at most ``keep`` rows."""
        if self._rows <= keep:
            return
        if self._total is None and self._dtype == self._like.dtype:
            self._total = add_up(self._parts, self._like, places=self._places)
        else:
            _add_onto(self._parts, self.running(), self._places)
        self._parts, self._rows, self._end = [], 0, 0


def _add_onto(parts: Sequence[Part], total: Tensor, places: Tensor | None) -> None:
    """Add to ``total`` in place, by runs of parts that touch: rows between them are neither read nor written."""
    if places is not None:
        add_up(parts, total, places=places, onto=total)
        return
    for run in _touching(parts):
        low, end = run[0].first, max(first + len(grad) for first, grad in run)
        rows = total[low:end]
        add_up([Part(first - low, grad) for first, grad in run], rows, onto=rows)


def _touching(parts: Sequence[Part]) -> list[list[Part]]:
    runs: list[list[Part]] = []
    end = -1
    for part in sorted(parts, key=lambda part: part.first):
        if part.first > end:
            runs.append([])
        runs[-1].append(part)
        end = max(end, part.first + len(part.grad))
    return runs


def add_up(
    parts: Sequence[Part], like: Tensor, *, places: Tensor | None = None, onto: Tensor | None = None
) -> Tensor:
    """Return the sum of the parts, summed in fp32 (fp64 for fp64) and rounded once.

    Args:
        parts: any number.
        like: [n, H, D]: shape, dtype and device of the result.
        places: int32 [n]: which row of the parts each row of the result is; none where no part has it. None: its own.
        onto: like ``like``, contiguous, of any dtype; added to in place and returned.
    """
    if onto is None and not parts:
        return zeros(like, like.dtype)
    if onto is None and places is None and len(parts) == 1 and len(parts[0].grad) == len(like):
        return parts[0].grad.to(like.dtype).contiguous()
    if triton_mode(like.device.type) == "triton":
        return _by_kernel(parts, like, places, onto)
    return add_up_plain(parts, like, places=places, onto=onto)


def add_up_plain(
    parts: Sequence[Part], like: Tensor, *, places: Tensor | None = None, onto: Tensor | None = None
) -> Tensor:
    """`add_up` as plain tensor code."""
    work = accumulator(like.dtype if onto is None else onto.dtype)
    num_rows = len(like)
    if places is not None:
        num_rows = max((part.first + len(part.grad) for part in parts), default=0)
    total = onto
    if total is None or total.dtype != work or places is not None:
        total = torch.zeros((num_rows, *like.shape[1:]), dtype=work, device=like.device)
    for first, grad in parts:
        total[first : first + len(grad)] += grad
    if places is None:
        if onto is None:
            return total.to(like.dtype)
        return onto if total is onto else onto.add_(total)
    rows = ((places >= 0) & (places < num_rows)).nonzero()[:, 0]
    result = zeros(like, like.dtype) if onto is None else onto
    # every row comes once: no atomics, two runs give the same bits
    found = total.index_select(0, places[rows])
    if onto is not None:
        found = onto.index_select(0, rows) + found
    result.index_copy_(0, rows, found.to(result.dtype))
    return result


def _by_kernel(
    parts: Sequence[Part], like: Tensor, places: Tensor | None, onto: Tensor | None
) -> Tensor:
    chunks = [parts[i : i + PARTS_AT_ONCE] for i in range(0, max(1, len(parts)), PARTS_AT_ONCE)]
    total = onto
    if total is None:
        dtype = like.dtype if len(chunks) == 1 else accumulator(like.dtype)
        total = like.new_empty(like.shape, dtype=dtype)
    for i, chunk in enumerate(chunks):
        shape = SumShape(
            part_dtypes=tuple(dtype_name(part.grad.dtype) for part in chunk), out_dtype=dtype_name(total.dtype),
            num_heads=like.shape[1], dim=like.shape[2], accumulate=onto is not None or i > 0,
            has_places=places is not None,
        )  # fmt: skip
        launch_sum(shape, total, chunk, places)
    return total if onto is not None else total.to(like.dtype)


def zeros(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Contiguous zeros in the shape of ``like``."""
    return torch.zeros_like(like, dtype=dtype, memory_format=torch.contiguous_format)
