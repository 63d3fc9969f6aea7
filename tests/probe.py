"""A draft that learns what it reads: after a step, the gradient of its table holds a value of every row.

Values are exact in float64, whatever the ranks and stages, so ids and masks can be compared by equality.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spec_compile as sc
from spec_compile import ParallelModel, Plan, lower
from spec_compile.batch import PackedBatch
from spec_compile.lowering import Lowered

from .models import tiny_llama
from .parallel import run_lowered

Read = Callable[[sc.DraftInputs], Tensor]
MOST_ROWS = 128
"""Rows that a packed row may have, dead ones included."""


class Probe(nn.Module):
    """Multiplies [T, W] values by a table of one entry a row."""

    def __init__(self, read: Read, width: int, taps: tuple[int, ...]) -> None:
        super().__init__()
        self.read, self.taps = read, taps
        self.table = nn.Parameter(torch.zeros(MOST_ROWS, width, dtype=torch.float64))

    def forward(self, inputs: sc.DraftInputs) -> sc.DraftOutput:
        values = self.read(inputs).double()
        weighted = values * F.embedding(inputs.index, self.table)
        return sc.DraftOutput(weighted.sum(), inputs.loss_mask.sum())


@functools.cache
def target() -> Any:
    """Two layers, shared between tests, so never changed by one."""
    return tiny_llama(layers=2, hidden=8, vocab=64, heads=2, kv_heads=1)


@functools.cache
def lowered_probe(
    read: Read, width: int, taps: tuple[int, ...], cp: int, pp: int
) -> tuple[Probe, Lowered]:
    probe = Probe(read, width, taps)
    return probe, lower(target(), probe, Plan(cp=cp, pp=pp, verify=False))


def read_rows(
    read: Read, batch: PackedBatch, width: int, *, cp: int = 1, pp: int = 1,
    taps: tuple[int, ...] = (), on: Any = None, **plan: Any,
) -> Tensor:  # fmt: skip
    """What a draft reads at each row of a step, [T, W] float64, from the last rank.

    Rows count in their micro-batch; with several micro-batches they add up at equal indices.
    """
    probe, lowered = lowered_probe(read, width, taps, cp, pp)
    lowered = dataclasses.replace(lowered, plan=Plan(cp=cp, pp=pp, **plan))

    def body(model: ParallelModel, rank: int) -> Tensor | None:
        model.step(batch, None, draft_denominator=1.0)
        return None if model.draft is None else model.draft.table.grad

    found = run_lowered(lowered, on or target(), probe, body)[-1]
    assert found is not None
    return found[: len(batch.tokens)]
