"""Rewrite attention in PyTorch's own spelling to the declared operator, where its mask has one of its forms."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from spec_compile.analysis.attention_proof import prove
from spec_compile.analysis.mask_forms import Branch, Form, Main, Segment, find_forms
from spec_compile.analysis.row_rules import Refusal, argument, rank
from spec_compile.analysis.sizes import Rows
from spec_compile.analysis.written_softmax import is_softmax_of_rows
from spec_compile.errors import PlanError
from spec_compile.ir.edit import call
from spec_compile.ir.facts import add_note, facts
from spec_compile.ir.meta import at_node, info, source_line, spelling

from .base import Cap, PassResult
from .declare_attention import NAME, Declarer, Run
from .joined_rows import JoinedRows
from .written_attention import WrittenAttention, expand_einsums

log = logging.getLogger(__name__)

aten = torch.ops.aten
SDPA = aten.scaled_dot_product_attention.default
ADVICE = "write sc.branch_attention(q, k, v, branches, q_limit=..., q_document=..., k_document=...)"
NO_DROPOUT = (
    "a training forward draws no random numbers, in any spelling: call it with dropout_p=0.0, or where that hangs on "
    "the training mode, call draft.eval()"
)
OPT_IN = (
    "is a softmax over rows of the packed row, written by hand; set draft.spec_compile_recognise = 'execution' to have "
    "the attention around it recognised and proved by execution, or"
)


@dataclass(frozen=True, slots=True)
class RecogniseAttention:
    """``scaled_dot_product_attention(q, cat(k), cat(v), mask)`` becomes ``branch_attention(q, k, v, branches)``.

    The mask is evaluated on every small packing and beyond its constants; what is of no known form is refused.
    So is the same written by hand, where the draft asks for it; then old and new are run and compared.
    """

    dealt: bool = False
    """Whether documents are dealt to micro-batches, so that a row must see those of its own document alone."""
    requires: ClassVar[frozenset[Cap]] = frozenset({Cap.ROLES})
    provides: ClassVar[frozenset[Cap]] = frozenset()

    def __call__(self, gm: GraphModule) -> PassResult:
        sizes = Rows(gm.graph)
        written = [n for n in gm.graph.nodes if _is_written(n, sizes)]
        proved = facts(gm).prove_by_execution
        if written and not proved:
            raise PlanError(at_node(written[0], OPT_IN) + f" {ADVICE}")
        if written:
            expand_einsums(gm)
        nodes = [n for n in gm.graph.nodes if n.target == SDPA or n in written]
        if not nodes:
            return PassResult(gm, 0)
        recogniser = _Recogniser(gm, self.dealt)
        for node in nodes:
            try:
                recogniser.rewrite(node)
            except Refusal as refusal:
                advice = refusal.advice or ADVICE
                raise PlanError(f"{at_node(node, str(refusal))}; {advice}") from None
        if recogniser.across:
            log.warning(
                "the draft attends across documents of the packed row in %s; add document[q] == document[k] to its "
                "mask where that is not meant (is_causal=True alone knows no documents)",
                "; ".join(recogniser.across),
            )
        gm.graph.eliminate_dead_code()
        return PassResult(gm, len(nodes))


class _Recogniser:
    def __init__(self, gm: GraphModule, dealt: bool) -> None:
        self.gm, self.dealt = gm, dealt
        self.sizes = Rows(gm.graph)
        self.joined = JoinedRows(gm, NAME)
        self.declarer = Declarer(gm)
        self.forms: dict[Any, list[list[Form]]] = {}
        self.across: dict[str, None] = {}
        """Lines whose rows see other documents, in order."""

    def rewrite(self, node: Node) -> None:
        if node.target == SDPA:
            self._rewrite_call(node)
        else:
            self._rewrite_written(node)

    def _rewrite_call(self, node: Node) -> None:
        q, k, v = (argument(node, name) for name in ("query", "key", "value"))
        if argument(node, "dropout_p", 0.0) != 0.0:
            raise Refusal("has active dropout", NO_DROPOUT)
        for operand in (q, k, v):
            _check_batch(operand)
        queries, keys, values = self.joined.runs_alike((q, k, v), node)
        if len(keys) != len(values):
            raise Refusal("has keys and values that were joined differently")
        rows, segments = ([self._segment(run) for run in runs] for runs in (queries, keys))
        mask, causal = argument(node, "attn_mask"), bool(argument(node, "is_causal", False))
        forms = self._forms(mask, rows, segments, causal=causal)
        scale = argument(node, "scale")
        scale = float(q.meta["val"].shape[-1]) ** -0.5 if scale is None else float(scale)
        outputs, notes = [], []
        for query, row, seen in zip(queries, rows, forms, strict=True):
            runs = [Run(*run) for run in zip(keys, values, seen, strict=True)]
            new, _ = self._declare(node, query, runs, row.each, scale)
            outputs.append(new)
            notes.append(_describe_runs(runs))
        self._replace(node, node, self._rejoined(node, outputs), notes)
        self.gm.graph.erase_node(node)

    def _rejoined(self, node: Node, outputs: list[Node]) -> Node:
        """Results of all runs of queries, where the attention's was."""
        if len(outputs) == 1:
            return outputs[0]
        dim = rank(node) - 2
        with self.gm.graph.inserting_before(node):
            args = (outputs, dim)
            new = call(self.gm.graph, aten.cat.default, args, like=node, origin=NAME)
        self.joined.follow(new, dim)
        return new

    def _rewrite_written(self, softmax: Node) -> None:
        written = WrittenAttention(self.gm, softmax, self.joined)
        q, output = written.query, written.standing
        for operand in (q, output, *written.keys, *written.values):
            _check_batch(operand)
        queries = self._segment(q)
        segments = [
            Segment(queries.anchored, queries.each, own=True) if own else self._segment(part)
            for part, own in zip(written.keys, written.own, strict=True)
        ]
        (forms,) = self._forms(written.mask, [queries], segments, causal=False)
        runs = [Run(*run) for run in zip(written.keys, written.values, forms, strict=True)]
        scale = written.scale()
        new, few = self._declare(output, q, runs, queries.each, scale)
        prove(self.gm, written.proof(new, few))
        self._replace(softmax, written.output, written.in_layout(new), [_describe_runs(runs)])

    def _declare(
        self, node: Node, q: Node, runs: Sequence[Run], each: int, scale: float
    ) -> tuple[Node, list[Run]]:
        mains = [run.form for run in runs if isinstance(run.form, Main)]
        if len(mains) != 1:
            raise Refusal(
                f"has {len(mains)} runs of main keys, expected one; the others must be branches"
            )
        if self.dealt and not mains[0].documents:
            raise Refusal(
                "lets a row see other documents of the packed row, so that results would depend on how documents are "
                "dealt to micro-batches: add document[q] == document[k] to its mask, or plan one micro-batch"
            )
        if not mains[0].documents:
            self.across[source_line(node)] = None
        return self.declarer.declare(node, q, runs, each, scale)

    def _replace(self, node: Node, old: Node, new: Node, found: Sequence[str]) -> None:
        old.replace_all_uses_with(new)
        how = "recognised" if node.target == SDPA else "proved by execution and recognised"
        line = source_line(node).partition(": ")[0]
        note = f"{spelling(node)} ({line}) was {how} as: {'; '.join(found)}"
        add_note(self.gm, note)

    def _segment(self, node: Node) -> Segment:
        size = node.meta["val"].shape[-2]
        each, anchored = self.sizes.multiple(size), self.sizes.anchored(size)
        if each < 1 or (each > 1 and not anchored):
            raise Refusal(
                f"has {size} queries or keys in a run, expected one a row of the packed row, or several an anchor; "
                "join the rows of several depths depth by depth, with torch.cat"
            )
        return Segment(anchored, each)

    def _forms(
        self,
        mask: Node | None,
        queries: Sequence[Segment],
        segments: Sequence[Segment],
        *,
        causal: bool,
    ) -> list[list[Form]]:
        key = (mask, causal, tuple(queries), tuple(segments))
        if key not in self.forms:
            self.forms[key] = find_forms(self.gm, mask, queries, segments, causal=causal)
        return self.forms[key]


def _is_written(node: Node, sizes: Rows) -> bool:
    return info(node).role == "draft" and is_softmax_of_rows(node, sizes)


def _check_batch(node: Node) -> None:
    shape = node.meta["val"].shape
    if len(shape) not in (3, 4) or (
        len(shape) == 4 and not (isinstance(shape[0], int) and shape[0] == 1)
    ):
        raise Refusal(f"has operands of shape {tuple(shape)}, expected [1, heads, rows, head_dim]")
    if isinstance(shape[-3], torch.SymInt):
        raise Refusal(
            f"has operands of shape {tuple(shape)}: the number of heads must be a constant"
        )


def _describe_runs(runs: Sequence[Run]) -> str:
    main = [_describe(run.form) for run in runs if isinstance(run.form, Main)]
    others = [_describe(run.form) for run in runs if isinstance(run.form, Branch)]
    return ", ".join(main + others)


def _describe(form: Form) -> str:
    if isinstance(form, Main):
        window = "" if form.window is None else f", window {form.window}"
        rows = "of the document" if form.documents else "of every document in the packed row"
        return f"main keys s < {form.limit} {rows}{window}"
    assert isinstance(form, Branch)
    return f"a branch by {form.group}{', causal inside' if form.causal else ''}"
