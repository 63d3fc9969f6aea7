"""Two ways to compute one attention, run in fp64 on small batches of random rows: results and gradients agree."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from spec_compile.ir import reference

from .evaluator import Evaluator, made_of
from .mask_forms import HIDDEN, STAND_INS, small_window
from .mask_program import SMALL, MaskProgram
from .mask_worlds import World, worlds
from .row_rules import Refusal

DECLARED = torch.ops.spec_compile.branch_attention.default
BATCHES = 12
"""Batches on which both are run: the largest ones, and some of the smallest."""
TOLERANCE = 1e-9
"""Of a difference, in units of the largest entry."""


@dataclass(frozen=True)
class Factor:
    """What a factor of the old way's products is made of."""

    runs: tuple[Node, ...]
    """[..., rows, head_dim], joined along the rows."""
    layout: tuple[int, ...]
    """Which dimension of the runs each dimension of the factor is."""


@dataclass(frozen=True)
class Proof:
    """What is to be compared."""

    old: Node
    new: Node
    """A view of the declared operator's result."""
    leaves: tuple[Node, ...]
    """Values that are drawn at random: queries, and every run of keys and values."""
    factors: Mapping[Node, Factor]
    """Of the old way's products."""
    mask: Node


def prove(gm: GraphModule, proof: Proof) -> None:
    """Run both ways forward and backward.

    Raises:
        Refusal: they differ, or cannot be run; says where and by how much.
    """
    program = MaskProgram(gm, proof.mask)
    large = bool(program.constants) and program.constants[-1] > SMALL
    anchored = program.evaluator.sizes.anchors is not None
    for base in STAND_INS if large else STAND_INS[:1]:
        stand_ins = program.shrunk(base)
        every = worlds(program.reach(stand_ins), anchored=anchored)
        kept = [*every[:: max(1, 2 * len(every) // BATCHES)], *every[-BATCHES // 2 :]]
        for seed, world in enumerate(kept):
            _compare(_Run(gm, proof, world, stand_ins, seed))


def measured_scale(gm: GraphModule, logits: Node, mask: Node, products: Sequence[Node]) -> float:
    """What all products are multiplied with on their way to the softmax.

    Raises:
        Refusal: it is not one number.
    """
    evaluator = Evaluator(gm, double=True)
    anchored = evaluator.sizes.anchors is not None
    world = worlds(1, anchored=anchored)[-1]
    ones: dict[Node, Any] = {
        node: torch.ones(evaluator.shape(node, world), dtype=torch.float64) for node in products
    }
    with_ones = _filled(evaluator, logits, world, ones, {})
    without = _filled(evaluator, mask, world, {}, {})
    seen = (with_ones - without)[without > HIDDEN]
    if not seen.numel() or not torch.allclose(seen, seen[:1]):
        raise Refusal("has scores that are not all multiplied with one number")
    return float(seen[0])


class _Run:
    """One batch: random leaves, and the values that follow from them."""

    def __init__(
        self, gm: GraphModule, proof: Proof, world: World, stand_ins: dict[int, int], seed: int
    ) -> None:
        self.evaluator = Evaluator(gm, double=True, bodies={DECLARED: _declared(stand_ins)})
        self.proof, self.world, self.stand_ins = proof, world, stand_ins
        draw = torch.Generator().manual_seed(seed)
        shapes = [self.evaluator.shape(leaf, world) for leaf in proof.leaves]
        self.leaves = [
            torch.randn(s, generator=draw, dtype=torch.float64).requires_grad_() for s in shapes
        ]

    def results(self, node: Node, *, joined: bool) -> list[Tensor]:
        """The value of a node, and the gradients of all leaves."""
        values: dict[Node, Any] = dict(zip(self.proof.leaves, self.leaves, strict=True))
        if joined:
            self._join(values)
        value = _filled(self.evaluator, node, self.world, values, self.stand_ins)
        return [value.detach(), *self._gradients(value)]

    def _join(self, values: dict[Node, Any]) -> None:
        """Give factors of products the values that their runs have."""
        made: dict[Node, Tensor] = {}
        for node, factor in self.proof.factors.items():
            rows = [
                _filled(self.evaluator, run, self.world, values, self.stand_ins)
                for run in factor.runs
            ]
            made[node] = torch.cat(rows, -2).permute(factor.layout)
        values.update(made)

    def _gradients(self, value: Tensor) -> list[Tensor]:
        weights = torch.randn(
            value.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
        )
        found = torch.autograd.grad((value * weights).sum(), self.leaves, allow_unused=True)
        pairs = zip(found, self.leaves, strict=True)
        return [torch.zeros_like(x) if grad is None else grad for grad, x in pairs]


def inverse(order: Sequence[int]) -> tuple[int, ...]:
    """The permutation that undoes one."""
    return tuple(list(order).index(d) for d in range(len(order)))


def _compare(run: _Run) -> None:
    proof = run.proof
    names = ["the result", *(f"the gradient of {leaf.name}" for leaf in proof.leaves)]
    pairs = zip(
        names,
        run.results(proof.old, joined=True),
        run.results(proof.new, joined=False),
        strict=True,
    )
    for name, old, new in pairs:
        size = max(1.0, float(new.abs().max()) if new.numel() else 1.0)
        difference = float((old - new).abs().max()) if old.shape == new.shape else float("inf")
        if not difference <= TOLERANCE * size:
            raise Refusal(
                f"was run beside branch_attention with the same mask and differs: {name} by {difference:.1e}, with "
                f"documents {run.world.document.tolist()}"
            )


def _filled(
    evaluator: Evaluator,
    node: Node,
    world: World,
    values: dict[Node, Any],
    stand_ins: dict[int, int],
) -> Tensor:
    """Value of a node, from those known; only what rows have no part in has its constants replaced."""
    found, random = dict(values), set(values)
    for source in made_of(node, known=values):
        if source.op == "placeholder" and not hasattr(world, str(source.target)):
            raise Refusal(f"depends on {source.target} besides its queries, keys, values and mask")
        if source.op == "get_attr" and evaluator.is_parameter(source):
            raise Refusal(f"depends on {source.target} besides its queries, keys, values and mask")
        if any(a in random for a in source.all_input_nodes):
            random.add(source)
        used = {} if source in random else stand_ins
        found[source] = evaluator.value(source, world, found, used)
    result: Tensor = found[node]
    return result


def _declared(stand_ins: dict[int, int]) -> Callable[..., Tensor]:
    """The plain body of the declared operator; its window is shrunk as the mask's constants are."""

    def body(
        q: Tensor, k: Tensor, v: Tensor, branch_k: list[Tensor], branch_v: list[Tensor],
        k_group: list[Tensor], q_group: list[Tensor], limit: Tensor, q_document: Tensor,
        k_document: Tensor, sinks: Tensor | None, scale: float, window: int,
    ) -> Tensor:  # fmt: skip
        branches = list(zip(branch_k, branch_v, k_group, q_group, strict=True))
        return reference.branch_attention(
            q, k, v, branches, q_limit=limit, q_document=q_document, k_document=k_document, scale=scale,
            window=None if window < 0 else small_window(window, stand_ins), sinks=sinks,
        )  # fmt: skip

    return body
