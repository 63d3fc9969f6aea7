"""What a mask is in terms of `branch_attention`: found by evaluation, on batches that decide it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from .mask_program import NO_BIAS, SMALL, MaskProgram
from .mask_worlds import World, worlds
from .row_rules import Refusal

STAND_INS = (11, 17)
"""Two choices of smaller constants: what holds for both holds for the large ones."""
HIDDEN = -1e9
"""An additive mask hides a key with this or less."""

MOST_SLOTS = 1500
"""So many slots are tried twice over, each with every key."""


@dataclass(frozen=True)
class Main:
    """Main keys: ``s < limit``, of the same document or of any, in a window or not."""

    limit: str
    """ "index", "index + 1" or "rows" of rows, "anchor" or "anchor + 1" of slots."""
    documents: bool
    window: int | None = None


@dataclass(frozen=True)
class Branch:
    """Branch keys: those of the same "row", the same "block", or the same "used block"."""

    group: str
    causal: bool = False
    """Slots of a block see those up to their own only."""


@dataclass(frozen=True)
class Segment:
    """A run of keys: one a row, or ``each`` an anchor."""

    anchored: bool
    each: int
    own: bool = False
    """One column of scores: every row's score of its own key."""

    def size(self, world: World) -> int:
        """Number of columns in a batch."""
        if self.own:
            return 1
        return self.each * (len(world.anchors) if self.anchored else world.rows)


NO_FORM = (
    "where it can say that, write sc.branch_attention(q, k, v, branches, q_limit=..., q_document=..., k_document=...): "
    "rows see s < q_limit[row] of a document, a window of it, and branch keys of the same group; other masks, such as "
    "every n-th key, no spelling has: take one of these in their place"
)

Form = Main | Branch | None
"""None: no row sees a key of the segment."""
Case = tuple[World, Tensor]
"""A batch, and which keys of one segment each row sees in it."""


def find_forms(
    gm: GraphModule,
    mask: Node | None,
    queries: Sequence[Segment],
    keys: Sequence[Segment],
    *,
    causal: bool,
) -> list[list[Form]]:
    """Form of every run of keys, for every run of queries, in order.

    Args:
        gm: the graph.
        mask: boolean, or added to scores; None sees all.
        queries: runs of rows, in order.
        keys: runs of keys, in order.
        causal: key ``s`` is hidden from row ``r < s``, both counted from the first.

    Raises:
        Refusal: the mask is none of the forms that `branch_attention` has; says what it shows.
    """
    program = None if mask is None else MaskProgram(gm, mask)
    if program is None:
        return _forms(
            lambda world: _everything(world, queries, keys, causal), queries, keys, (1, 1)
        )
    found: list[list[list[Form]]] = []
    chosen: list[dict[int, int]] = []
    for base in STAND_INS if program.constants and program.constants[-1] > SMALL else STAND_INS[:1]:
        stand_ins = program.shrunk(base)
        reach = (program.reach(stand_ins), program.reach(stand_ins, anchors=True))

        def visible(world: World, stand_ins: dict[int, int] = stand_ins) -> Tensor:
            wanted = _everything(world, queries, keys, causal)
            return wanted & _shown(program(world, stand_ins), wanted)

        found.append(_forms(visible, queries, keys, reach))
        chosen.append(stand_ins)
    return [
        [_agreed([forms[run][i] for forms in found], chosen) for i in range(len(keys))]
        for run in range(len(queries))
    ]


def _forms(
    visible: Callable[[World], Tensor],
    queries: Sequence[Segment],
    keys: Sequence[Segment],
    reach: tuple[int, int],
) -> list[list[Form]]:
    """Args as of `find_forms`; ``reach`` of the mask's constants in rows, and in numbers of anchors."""
    rows, anchors = reach
    anchored = any(segment.anchored for segment in [*queries, *keys])
    slots = max(sum(s.each for s in runs if s.anchored) for runs in (queries, keys)) * anchors
    if slots > MOST_SLOTS:
        raise Refusal(
            f"has a mask whose constants act together up to slot {slots} of all anchors, too far to try all that they "
            "do"
        )
    cases: dict[tuple[int, int], list[Case]] = defaultdict(list)
    for world in worlds(rows, anchored=anchored, anchors=anchors):
        shares = visible(world).split([q.size(world) for q in queries])
        for run, shown in enumerate(shares):
            for segment, part in enumerate(shown.split([k.size(world) for k in keys], 1)):
                cases[run, segment].append((world, part))
    return [
        [_form((run, i), row, key, cases[run, i]) for i, key in enumerate(keys)]
        for run, row in enumerate(queries)
    ]


def _form(number: tuple[int, int], queries: Segment, keys: Segment, cases: list[Case]) -> Form:
    """The one form that agrees on every batch."""
    if not any(bool(shown.any()) for _, shown in cases):
        return None
    if keys.own:
        return _own(number[1], queries, cases)
    for branch in _branches(queries, keys):
        if all(torch.equal(shown, _same(branch, queries, world)) for world, shown in cases):
            return branch
    if not keys.anchored and keys.each == 1:
        for main in _mains(queries):
            window = _window(main, queries, cases)
            for form in (main, replace(main, window=window)):
                if all(torch.equal(shown, _seen(form, queries, world)) for world, shown in cases):
                    return form
    raise Refusal(
        f"has a mask of another form than branch_attention's, in run {number[0]} of queries and run {number[1]} of "
        f"keys: {_example(cases)}",
        NO_FORM,
    )


def _own(number: int, queries: Segment, cases: list[Case]) -> Form:
    """Scores of own keys are a branch where no row's is hidden."""
    if queries.anchored or not all(bool(shown.all()) for _, shown in cases):
        raise Refusal(f"hides some rows' own keys, or has such keys of slots, in column {number}")
    return Branch("row")


def _mains(queries: Segment) -> list[Main]:
    limits = ("anchor", "anchor + 1") if queries.anchored else ("index + 1", "index", "rows")
    return [Main(limit, documents) for limit in limits for documents in (True, False)]


def _branches(queries: Segment, keys: Segment) -> list[Branch]:
    if queries != keys:
        return []
    if not queries.anchored:
        return [Branch("row")]
    return [Branch(g, causal) for causal in (False, True) for g in ("block", "used block")]


def _limits(form: Main, queries: Segment, world: World) -> tuple[Tensor, Tensor]:
    """Limit and document of every row."""
    if not queries.anchored:
        values = {"index": world.index, "index + 1": world.index + 1}
        return values.get(form.limit, torch.full_like(world.index, world.rows)), world.document
    limit = world.anchors + 1 if form.limit == "anchor + 1" else world.anchors
    each = queries.each
    return limit.repeat_interleave(each), world.anchor_document.repeat_interleave(each)


def _seen(form: Main, queries: Segment, world: World) -> Tensor:
    limit, document = _limits(form, queries, world)
    shown = world.index[None] < limit[:, None]
    if form.documents:
        shown = shown & (world.document[None] == document[:, None])
    if form.window is not None:
        shown = shown & (world.index[None] >= limit[:, None] - form.window)
    return shown


def _same(form: Branch, queries: Segment, world: World) -> Tensor:
    if form.group == "row":
        return torch.eye(world.rows, dtype=torch.bool)
    number = torch.arange(len(world.anchors)).repeat_interleave(queries.each)
    same = number[None] == number[:, None]
    if form.group == "used block":
        same = same & world.used.repeat_interleave(queries.each)[:, None]
    return same.tril() if form.causal else same


def _window(main: Main, queries: Segment, cases: list[Case]) -> int:
    """How far below its limit the farthest row is that any row sees."""
    farthest = 1
    for world, shown in cases:
        limit, _ = _limits(main, queries, world)
        far = (limit[:, None] - world.index[None]).masked_fill(~shown, 0)
        farthest = max(farthest, int(far.max()))
    return farthest


def _everything(
    world: World, queries: Sequence[Segment], keys: Sequence[Segment], causal: bool
) -> Tensor:
    shape = [sum(segment.size(world) for segment in runs) for runs in (queries, keys)]
    everything = torch.ones(shape, dtype=torch.bool)
    return everything.tril() if causal else everything


def _shown(mask: Tensor, like: Tensor) -> Tensor:
    """Which keys a mask shows, [R, S]; one that adds anything but 0 or nearly -inf is a bias."""
    each = mask.reshape(-1, *mask.shape[-2:]) if mask.ndim > 2 else mask[None]
    if not bool((each == each[:1]).all()):
        raise Refusal(
            f"has a mask that differs between heads or batches, of shape {tuple(mask.shape)}",
            NO_BIAS,
        )
    flat = each[0]
    if flat.dtype != torch.bool:
        finite = flat.double()
        if not bool(((finite == 0) | (finite <= HIDDEN)).all()):
            raise Refusal("adds a bias to its scores: values other than 0 and -inf", NO_BIAS)
        hides_finitely = bool(torch.isfinite(finite[finite != 0]).any())
        flat = finite == 0
        if hides_finitely and not bool(flat.expand(like.shape).any(-1).all()):
            raise Refusal(
                "hides all keys from a row by a finite number: such a row averages hidden values; use -inf"
            )
    return flat.expand(like.shape)


def _agreed(forms: Sequence[Form], chosen: Sequence[dict[int, int]]) -> Form:
    """The one form that is meant with every choice of smaller constants, which a window may count from."""
    meant = [_meanings(form, stand_ins) for form, stand_ins in zip(forms, chosen, strict=True)]
    common = [form for form in meant[0] if all(form in others for others in meant)]
    if len(common) != 1:
        raise Refusal("has a mask whose form depends on the size of its constants")
    return common[0]


def _meanings(form: Form, stand_ins: dict[int, int]) -> list[Form]:
    """The form as it is, and with each window that a smaller constant can have stood for."""
    if not isinstance(form, Main) or form.window is None:
        return [form]
    away = {constant - small for constant, small in stand_ins.items()}
    return [replace(form, window=form.window + far) for far in sorted({0, *away})]


def small_window(window: int, stand_ins: dict[int, int]) -> int:
    """The window that stands for one where smaller constants stand for a mask's."""
    for constant, small in stand_ins.items():
        if abs(window - constant) <= 2:
            return window - constant + small
    return window


def _example(cases: list[Case]) -> str:
    world, shown = max(cases[: len(cases) // 2 or 1], key=lambda case: int(case[1].sum()))
    rows: list[Any] = shown.int().tolist()
    text = "/".join("".join(map(str, row)) for row in rows)
    return f"of documents {world.document.tolist()}, rows see {text}"
