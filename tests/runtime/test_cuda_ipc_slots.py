"""Where values lie in a ring over CUDA IPC."""

from __future__ import annotations

import itertools

import pytest
import torch

from spec_compile.runtime.cuda_ipc_slots import Slots, places_of, slot_bytes, starts
from spec_compile.runtime.tap_slot import TapSpec
from spec_compile.runtime.tap_transport import RingLayout
from tests.runtime.plain_engine import PlainEngine

MIB = 1 << 20


class Watched(PlainEngine):
    """Remembers what was asked of it."""

    def allocate(self, num_bytes: int) -> int:
        self.asked = num_bytes
        return super().allocate(num_bytes)


def ring(rows: int, depth: int, *widths: int) -> RingLayout:
    spec = TapSpec(0, widths, (torch.bfloat16,) * len(widths), "test")
    return RingLayout(spec, depth, rows)


@pytest.mark.parametrize(
    ("rows", "widths", "depth", "expected"),
    [(2048, (4096,), 4, 64 * MIB), (2049, (4096,), 4, 66 * MIB), (7, (3, 5), 1, 2 * MIB), (0, (3,), 2, 2 * MIB)],
)  # fmt: skip
def test_a_ring_is_whole_pages_and_no_more(
    rows: int, widths: tuple[int, ...], depth: int, expected: int
) -> None:
    engine = Watched()
    Slots(engine, ring(rows, depth, *widths))
    assert engine.asked == expected


def test_values_start_at_aligned_places_and_do_not_overlap() -> None:
    layout = ring(7, 3, 3, 5, 512)
    at = starts(layout.spec, 7)
    assert [start % 512 for start in at] == [0] * 4
    for (start, end), size in zip(itertools.pairwise(at), layout.spec.sizes(7), strict=True):
        assert start + size <= end
    assert [place.payload for place in places_of(layout)] == [0, at[-1], 2 * at[-1]]
    assert slot_bytes(layout) == at[-1]
