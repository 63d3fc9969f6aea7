"""The rebuilt peer computes EAGLE-3's attention exactly: a wrong peer would be no measure of anything."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from spec_compile.bench.eagle3 import UspRank, splits
from spec_compile.bench.peers.usp import FabricGroup, Usp
from spec_compile.bench.replay import ReplayFabric
from spec_compile.bench.shards import Shape
from spec_compile.errors import ConfigError
from spec_compile.plan import Plan
from spec_compile.runtime.attention.backends import BACKENDS
from spec_compile.runtime.threads import thread_worlds
from tests.ranks import run_threads

HEADS, KEY_HEADS, DIM, PASSES = 8, 4, 16, 4
CPU = torch.device("cpu")


@dataclass
class Case:
    """Leaves of every pass, [S, heads, D] float64, and the loss's weights."""

    q: list[Tensor]
    k: list[Tensor]
    v: list[Tensor]
    weight: list[Tensor]

    @property
    def leaves(self) -> list[Tensor]:
        return [*self.q, *self.k, *self.v]


def random_case(total: int) -> Case:
    torch.manual_seed(total)

    def rows(heads: int) -> list[Tensor]:
        return [torch.randn(total, heads, DIM, dtype=torch.float64) for _ in range(PASSES)]

    return Case(rows(HEADS), rows(KEY_HEADS), rows(KEY_HEADS), rows(HEADS))


def dense_pass(case: Case, i: int) -> Tensor:
    """One softmax over the causal keys of pass 0 and the own key of each pass 1..i."""
    total, share = case.q[0].shape[0], HEADS // KEY_HEADS
    keys = torch.cat(case.k[: i + 1]).repeat_interleave(share, 1)
    values = torch.cat(case.v[: i + 1]).repeat_interleave(share, 1)
    causal = torch.ones(total, total, dtype=torch.bool).tril()
    visible = torch.cat([causal, *[torch.eye(total, dtype=torch.bool)] * i], 1)
    scores = torch.einsum("rhd,shd->hrs", case.q[i], keys) * DIM**-0.5
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.einsum("hrs,shd->rhd", weights, values)


def dense(case: Case) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs of every pass, and gradients of every leaf."""
    leaves = [x.requires_grad_() for x in case.leaves]
    outs = [dense_pass(case, i) for i in range(PASSES)]
    loss = torch.stack([(o * w).sum() for o, w in zip(outs, case.weight, strict=True)]).sum()
    return outs, list(torch.autograd.grad(loss, leaves))


def usp(case: Case, num_ulysses: int, num_ring: int) -> tuple[list[Tensor], list[Tensor]]:
    """The same by the rebuilt procedure on threads; rows padded to a multiple of the ranks."""
    total, ranks = case.q[0].shape[0], num_ulysses * num_ring
    n = -(-total // ranks)
    worlds = thread_worlds(Plan(cp=num_ulysses, pp=num_ring))

    def run(rank: int) -> tuple[list[Tensor], list[Tensor]]:
        fabrics = worlds[rank].fabrics
        groups = (FabricGroup(fabrics["cp"]), FabricGroup(fabrics["pp"]))
        procedure = Usp(*groups, BACKENDS["aten_cpu"], DIM**-0.5)

        def own(x: Tensor) -> Tensor:
            padded = torch.nn.functional.pad(x.detach(), (0, 0, 0, 0, 0, n * ranks - total))
            return padded[rank * n : (rank + 1) * n].clone().requires_grad_()

        q, k, v = ([own(x) for x in xs] for xs in (case.q, case.k, case.v))
        cache: tuple[list[Tensor], list[Tensor]] = ([], [])
        outs = [procedure.attend(q[i], k[i], v[i], cache) for i in range(PASSES)]
        loss = torch.stack(
            [(o * own(w)).sum() for o, w in zip(outs, case.weight, strict=True)]
        ).sum()
        grads = torch.autograd.grad(loss, [*q, *k, *v])
        return [o.detach() for o in outs], list(grads)

    per_rank = run_threads(ranks, run)
    outs, grads = (
        [torch.cat(parts)[:total] for parts in zip(*(r[i] for r in per_rank), strict=True)]
        for i in range(2)
    )
    return outs, grads


@pytest.mark.parametrize(
    ("num_ulysses", "num_ring", "total"),
    [(1, 1, 19), (1, 2, 21), (1, 3, 31), (2, 1, 17), (4, 1, 30), (2, 2, 37), (1, 4, 40)],
)
def test_every_split_equals_the_dense_softmax_with_all_gradients(
    num_ulysses: int, num_ring: int, total: int
) -> None:
    case = random_case(total)
    expected, expected_grads = dense(case)
    outs, grads = usp(case, num_ulysses, num_ring)
    for found, want in zip([*outs, *grads], [*expected, *expected_grads], strict=True):
        torch.testing.assert_close(found, want.detach(), rtol=1e-10, atol=1e-11)


def test_whole_heads_are_dealt_or_the_split_is_refused() -> None:
    shape = Shape(HEADS, KEY_HEADS, DIM, torch.float32)
    assert splits(8, shape, "all") == [(1, 8), (2, 4), (4, 2)]
    assert splits(8, shape, "ring") == [(1, 8)]
    groups = (ReplayFabric("ulysses", 0, 8, CPU), ReplayFabric("ring", 0, 1, CPU))
    with pytest.raises(ConfigError, match="use a smaller Ulysses part"):
        UspRank(shape, 32, *groups, CPU, backend="aten_cpu", passes=2)


@pytest.mark.parametrize(("num_ulysses", "num_ring"), [(1, 4), (4, 1), (2, 2)])
def test_bytes_sent_are_those_of_the_published_loops(num_ulysses: int, num_ring: int) -> None:
    """Ring: K, V each hop, and fp32 dK, dV on every hop home; Ulysses: q, k, v and out, both ways."""
    shape, total, passes = Shape(8, 4, 16, torch.bfloat16), 64, 3
    groups = (
        ReplayFabric("ulysses", 0, num_ulysses, CPU),
        ReplayFabric("ring", num_ring - 1, num_ring, CPU),
    )
    rank = UspRank(shape, total, *groups, CPU, backend="aten_cpu", passes=passes)
    outs = rank.forward()
    forward = rank.sent_bytes()
    rank.backward(outs)
    backward = rank.sent_bytes()
    n = total // (num_ulysses * num_ring)
    queries, pair = n * 8 * 16, 2 * n * 4 * 16
    moved = (2 * queries + pair) * 2 * (num_ulysses - 1) // num_ulysses
    ring = (num_ring - 1) * pair * 2
    home = num_ring * pair * 4 if num_ring > 1 else 0
    assert forward == passes * (moved + ring)
    assert backward == passes * (moved + ring + home)
