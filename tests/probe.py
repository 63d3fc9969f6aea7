"""A draft that learns what it reads: the gradient of its table holds a value of every row, by the row's token.

Values are exact in float64, whatever the ranks and stages, so ids and masks are compared by equality.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spec_compile as sc
from spec_compile import ParallelModel, Plan, lower
from spec_compile.batch import PackedBatch
from spec_compile.lowering import Lowered

from .models import tiny_llama
from .oracle import documents_of, first_tokens, run_target
from .parallel import run_lowered

VOCAB, DIM = 64, 8
TAPS = (1, 0)
IDS = ("token", "position", "document", "mask", "next", "second", "next mask", "second mask", "row")
"""Columns of one number; behind them come embeddings, features and logits."""
WIDTHS = {**dict.fromkeys(IDS, 1), "embedding": DIM, "features": 2 * DIM, "logits": VOCAB}


class Probe(nn.Module):
    """Multiplies what it reads at a row by the table's entry of the row's token."""

    taps = TAPS

    def __init__(self) -> None:
        super().__init__()
        width = sum(WIDTHS.values())
        self.table = nn.Parameter(torch.zeros(VOCAB, width, dtype=torch.float64))

    def forward(self, inputs: sc.DraftInputs) -> sc.DraftOutput:
        tokens, document, mask = inputs.tokens, inputs.document, inputs.loss_mask
        later = F.pad(tokens[1:], (0, 1))  # spelled by hand: it runs over the ends of documents
        ids = [
            tokens, inputs.positions, document, mask,
            sc.shift(tokens, 1, document), sc.shift(tokens, 2, document),
            sc.shift(mask, 1, document), sc.shift(mask, 2, document), later,
        ]  # fmt: skip
        values = torch.cat(
            [
                torch.stack([x.double() for x in ids], 1),
                inputs.embedding(sc.shift(tokens, 1, document)),
                inputs.features,
                F.linear(inputs.teacher.hidden, inputs.teacher.weight),
            ],
            1,
        )
        return sc.DraftOutput((values * F.embedding(tokens, self.table)).sum(), mask.sum())


@functools.cache
def target() -> Any:
    """Channel 0 of an embedding is the token's id. Shared, so never changed by a test."""
    made = tiny_llama(layers=2, hidden=DIM, vocab=VOCAB, heads=2, kv_heads=1)
    with torch.no_grad():
        made.get_input_embeddings().weight[:, 0] = torch.arange(VOCAB)
    return made


@functools.cache
def lowered_probe(cp: int, pp: int) -> tuple[Probe, Lowered]:
    probe = Probe()
    return probe, lower(target(), probe, Plan(cp=cp, pp=pp, verify=False))


def distinct(lengths: Sequence[int], *, first: int = 0, seed: int = 0) -> PackedBatch:
    """Make a batch in which no token comes twice; some are masked."""
    total = sum(lengths)
    draw = torch.Generator().manual_seed(seed)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    tokens = first + torch.randperm(total, generator=draw)
    return PackedBatch(tokens, offsets, torch.rand(total, generator=draw) < 0.7)


def probed(
    given: Sequence[PackedBatch] | PackedBatch, *, cp: int = 1, pp: int = 1, dp: int = 1,
    before: Callable[[ParallelModel], Any] | None = None, **plan: Any,
) -> Tensor:  # fmt: skip
    """What the draft read in a step, [V, W] by token, from the last rank; ``before`` it is called on every rank."""
    batches = [given] if isinstance(given, PackedBatch) else given
    probe, lowered = lowered_probe(cp, pp)
    lowered = dataclasses.replace(lowered, plan=Plan(cp=cp, pp=pp, dp=dp, **plan))

    def body(model: ParallelModel, rank: int) -> Tensor | None:
        if before is not None:
            before(model)
        model.step(batches[model.dp_rank], None, draft_denominator=1.0)
        assert model.draft is not None
        table: Any = model.draft.table
        on_last_stage = rank >= cp * dp * (pp - 1)
        assert table.is_meta is not on_last_stage
        grad: Tensor | None = table.grad
        return grad

    found = run_lowered(lowered, target(), probe, body)[-1]
    assert found is not None
    return found


def column(found: Tensor, name: str, tokens: Tensor) -> Tensor:
    """Values of one name at each row, [T, width]."""
    first = 0
    for other, width in WIDTHS.items():
        if other == name:
            return found[tokens, first : first + width]
        first += width
    raise KeyError(name)


def expected(batch: PackedBatch) -> dict[str, Tensor]:
    """The same, written row by row over the documents; and the target's own features and logits."""
    table = target().get_input_embeddings().weight.detach()
    valid = batch.loss_mask & ~first_tokens(batch)
    rows: list[list[int]] = []
    nexts = []
    for number, (ids, mask) in enumerate(
        zip(documents_of(batch, batch.tokens), documents_of(batch, valid), strict=True)
    ):
        for t in range(len(ids)):
            ahead = [int(ids[t + k]) if t + k < len(ids) else 0 for k in (1, 2)]
            masks = [int(mask[t + k]) if t + k < len(ids) else 0 for k in (1, 2)]
            rows.append([int(ids[t]), t, number, int(mask[t]), *ahead, *masks])
            # past the end of a document the shift gives 0, whose embedding is that of token 0
            nexts.append(table[ahead[0]])
    later = [[*rows[t], rows[t + 1][0] if t + 1 < len(rows) else 0] for t in range(len(rows))]
    numbers = torch.tensor(later, dtype=torch.float64)
    dense = run_target(target(), batch, TAPS, grad=False)
    return {name: numbers[:, i : i + 1] for i, name in enumerate(IDS)} | {
        "embedding": torch.stack(nexts),
        "features": dense.features,
        "logits": dense.logits,
    }
