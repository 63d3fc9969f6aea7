"""Bring values that cross pipeline stages to the shape of a tap, [rows, width], and back."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from spec_compile.analysis.sizes import Rows
from spec_compile.errors import PlanError
from spec_compile.ir.edit import call, fake
from spec_compile.ir.meta import at_node, info, update
from spec_compile.ir.placement import Kind, Placement, replicated, rows

aten = torch.ops.aten
MOST_FIXED = 16
"""Vectors that are sent once a row although all rows' are the same: more would swell the channel's slots."""


class TapShape:
    """How one value travels: rows first and all else flat; what has no rows is sent once a row.

    A rank has no more anchors than rows: a value of anchors is filled up to the number of rows.
    Embeddings of a few fixed ids have none: repeated over the rows they need no channel of their own.
    """

    def __init__(
        self, gm: GraphModule, value: Node, frame: tuple[Node, Node | None], origin: str
    ) -> None:
        tensor = fake(value)
        if tensor is None:
            raise PlanError(
                at_node(value, "crosses pipeline stages to the draft, and is no tensor; ")
                + "compute it from values of one stage, or use pp=1"
            )
        self.graph, self.value, self.origin = gm.graph, value, origin
        self.own_rows, self.own_anchors = frame
        placement = info(value).placement or replicated(batch=False)
        self.dim = placement.dim if placement.kind in (Kind.ROWS, Kind.FULL) else -1
        self.shape = list(tensor.shape)
        self.each = 1 if self.dim < 0 else Rows(gm.graph).multiple(self.shape[self.dim])
        self.rest = [int(s) for d, s in enumerate(self.shape) if d != self.dim]
        self.width = math.prod([self.each, *self.rest])
        fixed = math.prod(self.rest[:-1]) if self.dim < 0 else 0
        if fixed > MOST_FIXED:
            raise PlanError(
                at_node(
                    value,
                    f"embeds {fixed} fixed ids on the first pipeline stage for a draft on the last, ",
                )
                + f"once a row; with pp > 1 at most {MOST_FIXED}: give the draft a table of its own, read "
                "teacher.weight, or use pp=1"
            )

    @property
    def plain(self) -> bool:
        """Whether the value is [rows, width] as it is."""
        apart = self.dim == 0 and len(self.rest) == 1 and self.each == 1
        return apart and self.own_anchors is None

    def packed(self, stage: int) -> Node:
        """[rows, width] of the value on its own stage; call it where nodes may be inserted."""
        x = self.value
        if self.plain:
            return x
        if self.dim < 0:
            flat = self._call(aten.reshape.default, x, [1, self.width], stage=stage)
            length = self._length(self.own_rows, stage)
            return self._call(aten.expand.default, flat, [length, self.width], stage=stage)
        if self.dim > 0:
            x = self._call(aten.movedim.int, x, self.dim, 0, stage=stage)
        flat = self._call(aten.reshape.default, x, [-1, self.width], stage=stage)
        if self.own_anchors is None:
            return flat
        both = [self._length(node, stage) for node in (self.own_rows, self.own_anchors)]
        missing = self._number(operator.sub, both, stage)
        # fake values are made by hand: torch would compare the two symbolic numbers
        filled = self._fake(self.own_rows)
        return self._call(
            aten.constant_pad_nd.default, flat, [0, 0, 0, missing], stage=stage, val=filled
        )

    def unpacked(self, part: Node, stage: int) -> Node:
        """The value again, from [rows, width] on the stage that reads it."""
        if self.plain:
            return part
        if self.dim < 0:
            one = self._call(aten.select.int, part, 0, 0, stage=stage)
            return self._call(aten.reshape.default, one, self.shape, stage=stage)
        if self.own_anchors is not None:
            length = self._length(self.own_anchors, stage)
            cut = self._fake(self.own_anchors)
            part = self._call(aten.slice.Tensor, part, 0, 0, length, stage=stage, val=cut)
        x = self._call(aten.reshape.default, part, [-1, *self.rest], stage=stage)
        return x if self.dim == 0 else self._call(aten.movedim.int, x, 0, self.dim, stage=stage)

    def _length(self, own: Node, stage: int) -> Node:
        return self._number(aten.sym_size.int, [own, 0], stage, own.meta["val"].shape[0])

    def _number(self, target: Any, args: list[Any], stage: int, val: Any = None) -> Node:
        val = target(*(n.meta["val"] for n in args)) if val is None else val
        node = call(
            self.graph, target, args, like=self.own_rows, origin=self.origin, val=val,
            placement=replicated(batch=True),
        )  # fmt: skip
        update(node, stage=stage)
        return node

    def _fake(self, own: Node) -> torch.Tensor:
        """[rows, width] or [anchors, width] of the value's type."""
        value: torch.Tensor = self.value.meta["val"]
        return value.new_empty(own.meta["val"].shape[0], self.width)

    def _call(self, target: Any, x: Node, *args: Any, stage: int, val: Any = None) -> Node:
        if val is None:
            given = torch.fx.map_arg(args, lambda n: n.meta["val"])
            val = target(x.meta["val"], *given)
        found = [d for d, size in enumerate(val.shape) if isinstance(size, torch.SymInt)]
        placement: Placement = rows(found[0]) if found else replicated(batch=False)
        node = call(
            self.graph, target, (x, *args), like=self.value, origin=self.origin, val=val,
            placement=placement,
        )  # fmt: skip
        update(node, stage=stage)
        return node
