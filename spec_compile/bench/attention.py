"""Context-parallel attention and all passes of EAGLE-3, rank by rank on one device, beside peers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from spec_compile.analysis.cost import AttentionSize, predict
from spec_compile.analysis.hardware import hardware_for
from spec_compile.runtime.attention.backends import backend_for
from spec_compile.runtime.kernel_cost import kernel_cost
from spec_compile.runtime.layout import RowLayout, plan_layout

from .eagle3 import Eagle3Rank, UspRank, needed_bytes, pool_bytes
from .replay import ReplayFabric
from .report import Ideal, Row
from .rows import Settings, measure_rank, row_of
from .shards import causal_pairs, flops_of
from .work import Measured, Work


def measure_passes(
    settings: Settings, case: str, lengths: Sequence[int], cp: int, *, strategy: str,
    backend: str = "auto", passes: int = 1, ideal: Ideal | None = None, one_device: Row | None = None,
) -> Row:  # fmt: skip
    """Time a causal attention (one pass), or all passes of EAGLE-3, on each rank alone; the slowest counts.

    Args:
        settings: of the run.
        case: name of the lengths.
        lengths: of the documents.
        cp: ranks.
        strategy: "ring", "all_gather" or "pass_q".
        backend: name of the attention backend.
        passes: of the training-time test; 1 is plain causal attention.
        ideal: rates to compare with.
        one_device: the row of the same case with one rank.
    """
    shape, device = settings.shape, settings.device
    name = backend_for(device, shape.dtype, shape.dim, shape.dim, backend)
    layout = plan_layout(lengths, cp, by_keys=strategy == "pass_q", kernels=kernel_cost({name}))
    # who is visited most is not what the layout counts
    every = settings.all_ranks or strategy == "pass_q"
    ranks = range(cp) if every else _candidates(layout)

    def run(rank: int) -> Measured:
        def make() -> Work:
            fabric = ReplayFabric("cp", rank, cp, device)
            return Eagle3Rank(
                shape, layout, lengths, fabric, device, strategy=strategy, backend=backend, passes=passes
            )  # fmt: skip

        return measure_rank(settings, make, pool_bytes)

    measured = [run(rank) for rank in ranks]
    flops = flops_of(shape, passes * causal_pairs(lengths))
    gathered = len(layout.slots) if strategy == "all_gather" and cp > 1 else 0
    needed = needed_bytes(shape, layout.rows_per_rank, gathered, passes)
    what = "one device" if cp == 1 else strategy
    row = row_of(settings, case, what, name, cp, ranks, measured, flops, ideal, needed, one_device)
    return replace(row, predicted_ms=predicted_ms(settings, layout, lengths, strategy, passes))


def predicted_ms(
    settings: Settings, layout: RowLayout, lengths: Sequence[int], strategy: str, passes: int, *,
    exchange: bool = False,
) -> float:  # fmt: skip
    """What the cost model expects of the slowest rank, forward and backward.

    Args:
        settings: of the run.
        layout: where the rows live.
        lengths: of the documents.
        strategy: how main keys and queries meet.
        passes: that read the same main keys.
        exchange: whether what the exchange adds counts.
    """
    shape = settings.shape
    size = AttentionSize.causal(
        tuple(lengths), heads=shape.heads, kv_heads=shape.key_heads, head_dim=shape.dim,
        itemsize=shape.dtype.itemsize,
    )  # fmt: skip
    expected = predict(
        strategy, size, layout.cp, readers=passes, imbalance=layout.imbalance,
        hardware=hardware_for(settings.device.type),
    )  # fmt: skip
    if exchange:
        return expected.total_ms
    return expected.forward_compute_ms + expected.backward_compute_ms


def measure_usp(
    settings: Settings, case: str, total: int, split: tuple[int, int], *, backend: str, passes: int,
    ideal: Ideal | None = None, repeat_heads: bool = False,
) -> Row:  # fmt: skip
    """Time the published procedure on each rank alone, for one document; the slowest counts.

    Args:
        settings: of the run.
        case: name of the length.
        total: tokens.
        split: sizes of the Ulysses part and of the ring.
        backend: name of the kernels of the tiles.
        passes: of the training-time test.
        ideal: rates to compare with.
        repeat_heads: keys and values repeated to the query heads, as NeMo Automodel caches them.
    """
    shape, device = settings.shape, settings.device
    num_ulysses, num_ring = split
    # a contiguous ring gives its last rank the most; the ranks of a Ulysses group do the same work
    ranks = range(num_ring) if settings.all_ranks else [num_ring - 1]

    def run(rank: int) -> Measured:
        def make() -> Work:
            groups = (
                ReplayFabric("ulysses", 0, num_ulysses, device),
                ReplayFabric("ring", rank, num_ring, device),
            )
            return UspRank(
                shape, total, *groups, device, backend=backend, passes=passes, repeat_heads=repeat_heads
            )  # fmt: skip

        return measure_rank(settings, make, pool_bytes)

    measured = [run(rank) for rank in ranks]
    cp = num_ulysses * num_ring
    label = "repeated heads" if repeat_heads else "USP"
    what = f"{label}, ulysses {num_ulysses} x ring {num_ring}"
    rows = -(-total // cp)
    needed = needed_bytes(shape, rows, 0, passes)
    flops = flops_of(shape, passes * causal_pairs([total]))
    owners = [rank * num_ulysses for rank in ranks]
    return row_of(settings, case, what, backend, cp, owners, measured, flops, ideal, needed, None)


def compare(ours: Row, peer: Row) -> str:
    """Say how much slower and larger a peer is."""
    text = (
        f"    {peer.case}, cp {peer.cp}: {peer.what} ({peer.kernel}) takes "
        f"{peer.total.median / ours.total.median:.2f} times the time of {ours.what} ({ours.kernel}), "
        f"{peer.forward.median / ours.forward.median:.2f} forward and "
        f"{peer.backward.median / ours.backward.median:.2f} backward"
    )
    if peer.peak_bytes is not None and ours.peak_bytes is not None:
        text += f", and {peer.peak_bytes / ours.peak_bytes:.2f} times the memory"
    if sum(ours.sent) and sum(peer.sent):
        text += f", and sends {sum(peer.sent) / sum(ours.sent):.2f} times the bytes"
    return text


def _candidates(layout: RowLayout) -> list[int]:
    """Ranks that can be the slowest: the first, and the one with the most work."""
    return sorted({0, int(layout.work.argmax())})
