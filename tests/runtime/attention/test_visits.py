"""What a micro-batch goes by where the graph leaves ring or visits open."""

from __future__ import annotations

import numpy as np
import torch

from spec_compile.ir.traffic import RowBytes
from spec_compile.runtime.attention.visits import fewest_bytes
from spec_compile.runtime.layout import RowLayout, plan_layout

ROW = RowBytes.of(heads=32, kv_heads=8, head_dim=128, value_dim=128, itemsize=2)


def chosen(layout: RowLayout, lengths: list[int]) -> str:
    document = np.repeat(np.arange(len(lengths)), lengths)
    document = np.append(document, np.full(len(layout.slots) - len(document), len(lengths)))
    by_rank = torch.from_numpy(document[layout.slots])
    return fewest_bytes(
        by_rank, torch.from_numpy(layout.slots + 1), torch.from_numpy(document),
        torch.from_numpy(layout.slots), window=-1, live_rows=sum(lengths), size=layout.cp, row=ROW,
    )  # fmt: skip


def test_rows_visit_where_documents_are_whole() -> None:
    lengths = [96] * 16
    assert chosen(plan_layout(lengths, 4), lengths) == "pass_q"


def test_a_long_document_goes_by_ring() -> None:
    assert chosen(plan_layout([4096], 4), [4096]) == "ring"


def test_rows_do_not_visit_a_rank_whose_keys_are_seen_most() -> None:
    """Fewer bytes, but traded rows make one rank's keys seen by many."""
    lengths = np.random.default_rng(0).lognormal(np.log(1500), 1.0, 60).astype(int).tolist()
    assert chosen(plan_layout(lengths, 8), lengths) == "ring"
    assert chosen(plan_layout(lengths, 8, by_keys=True), lengths) == "pass_q"
