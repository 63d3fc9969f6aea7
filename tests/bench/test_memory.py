"""Memory of EAGLE-3's passes, counted by live storages; kernels take and give memory but do not run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from spec_compile.bench.eagle3 import Eagle3Rank, needed_bytes
from spec_compile.bench.replay import ReplayFabric
from spec_compile.bench.shards import Shape
from spec_compile.bench.watch import Calls, LiveBytes
from spec_compile.codegen.kernel import Kernel
from spec_compile.runtime.attention import backends, merges, parts, tiles
from spec_compile.runtime.attention.cudnn import MOST_KEYS, Cudnn
from spec_compile.runtime.layout import plan_layout

CPU = torch.device("cpu")


class Silent(Cudnn):
    """Takes what cuDNN takes on a GPU: results, and in the backward fp32 keys and values a query head."""

    name = "silent"
    device_type: str | None = None
    most_keys: int | None = MOST_KEYS // 2
    """In the proportion of twice as many tokens, so that a test holds less."""

    def limit(self, *rest: object) -> str | None:
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        return torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor, **options: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        sizes = [(len(k), q.shape[1], k.shape[2])] * 2 + [q.shape]
        scratch = [torch.empty(size) for size in sizes]
        del scratch
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Go the way of a GPU, as far as memory is concerned."""
    monkeypatch.setattr(Kernel, "launch", lambda self, num_programs, *args: None)
    for module in (tiles, parts, merges):
        monkeypatch.setattr(module, "triton_mode", lambda kind: "triton")
    monkeypatch.setattr(backends, "_limit", lambda *args: None)
    monkeypatch.setitem(backends.BACKENDS, "silent", Silent())


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize(("strategy", "most"), [("all_gather", 1.85), ("ring", 1.8)])
def test_seven_passes_hold_little_beyond_what_they_save(strategy: str, most: float) -> None:
    cp, passes, lengths = 8, 7, [65536]
    shape, layout = Shape(heads=4, key_heads=1, dim=64), plan_layout(lengths, cp)
    fabric = ReplayFabric("cp", 0, cp, CPU)
    gathered = len(layout.slots) if strategy == "all_gather" else 0
    needed = needed_bytes(shape, layout.rows_per_rank, gathered, passes)
    with LiveBytes() as watch:
        work = Eagle3Rank(
            shape, layout, lengths, fabric, CPU, strategy=strategy, backend="silent", passes=passes
        )
        work.backward(work.forward())
    peak = watch.peak - fabric.pool_bytes
    assert needed < peak <= most * needed, "\n".join(map(str, watch.holders()))


def test_storages_count_once_and_until_they_are_freed() -> None:
    with LiveBytes() as watch:
        x = torch.zeros(1000, dtype=torch.float32)
        y = x[::2] + 1
        del y
        z = x.view(10, 100)
    assert watch.peak == 4000 + 2000
    assert watch.live == 4000
    del x, z
    assert watch.live == 0
    assert dict(watch.holders()) == {"outside zeros": 4000, "outside add": 2000}


def test_calls_are_counted_inside_operators_and_views_are_not() -> None:
    with Calls() as calls:
        x = torch.empty(4).fill_(1.0).view(2, 2).t()
        torch.ops.spec_compile.shift_whole(x, 1, torch.zeros(2, dtype=torch.int64), 2)
    found = {line.split()[-1] for line, _ in calls.lines()}
    assert {"fill_", "where", "eq"} <= found
    assert not found & {"view", "t", "empty", "slice"}
