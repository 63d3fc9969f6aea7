"""The generated attention kernels: each row sees an interval of the keys, given by two vectors."""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from .kernel import TRITON_TYPES, Kernel, dtype_name, load_kernel, padded, render


class TileSize(NamedTuple):
    """What one program works on at a time."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """What the kernels are generated for."""

    num_heads: int
    num_key_heads: int
    head_dim: int
    value_dim: int
    dtype: str
    """Dtype of q, k, v and the gradient of the output: "bfloat16", "float16" or "float32"."""
    scale: float
    """Factor on the scores; a constant of the kernels."""
    sum_dtype: str = ""
    """Dtype of the running sums that the kernel for dk and dv adds to; "" where it writes both anew."""

    @property
    def forward_tile(self) -> TileSize:
        """Tile of the forward; these sizes were the fastest on packed rows on an H200."""
        return self._tile(TileSize(64, 64, 4, 3), TileSize(64, 64, 4, 3), TileSize(64, 64, 4, 2))

    @property
    def backward_q_tile(self) -> TileSize:
        """Tile of the kernel for dq."""
        return self._tile(TileSize(128, 64, 8, 3), TileSize(128, 64, 8, 3), TileSize(64, 32, 4, 2))

    @property
    def backward_kv_tile(self) -> TileSize:
        """Tile of the kernel for dk and dv."""
        return self._tile(TileSize(64, 64, 4, 2), TileSize(32, 64, 4, 3), TileSize(32, 64, 8, 2))

    def _tile(self, narrow: TileSize, usual: TileSize, wide: TileSize) -> TileSize:
        if self.dtype == "float32":
            return TileSize(32, 32, 4, 1)
        widest = max(padded(self.head_dim), padded(self.value_dim))
        return narrow if widest <= 64 else usual if widest <= 128 else wide

    def signature(self, kernel: str) -> dict[str, str]:
        """Triton type of every argument of one kernel, in order."""
        low = "*" + TRITON_TYPES[self.dtype]
        data = {"q_ptr": low, "k_ptr": low, "v_ptr": low}
        rows = {"low_ptr": "*i32", "high_ptr": "*i32"}
        merged = {"grad_ptr": low, "lse_ptr": "*fp32", "delta_ptr": "*fp32"}
        if kernel == "attention_forward":
            types = {"out_ptr": low, "lse_ptr": "*fp32", **data, **rows, "tiles_ptr": "*i32"}
        elif kernel == "attention_backward_q":
            types = {"dq_ptr": low, **data, **merged, **rows, "tiles_ptr": "*i32"}
        else:
            lists = {"key_tiles_ptr": "*i32", "items_ptr": "*i32"}
            out = "*" + TRITON_TYPES[self.sum_dtype or self.dtype]
            types = {"dk_ptr": out, "dv_ptr": out, **data, **merged, **rows, **lists}
        return types | {"num_keys": "i32"}


KERNELS = ("attention_forward", "attention_backward_q", "attention_backward_kv")


@functools.cache
def tile_of(shape: AttentionShape, kernel: str) -> TileSize:
    """Tile size of one of `KERNELS`."""
    tiles = (shape.forward_tile, shape.backward_q_tile, shape.backward_kv_tile)
    return tiles[KERNELS.index(kernel)]


def attention_source(shape: AttentionShape, kernel: str) -> str:
    """Generated Python text of one of `KERNELS` for ``shape``."""
    tile = tile_of(shape, kernel)
    return render(
        f"{kernel}.py.jinja",
        dataclasses.asdict(shape)
        | {
            "arguments": list(shape.signature(kernel)),
            "rows": tile.rows,
            "keys": tile.keys,
            "accumulate": shape.sum_dtype != "",
            "head_block": max(16, padded(shape.head_dim)),
            "value_block": max(16, padded(shape.value_dim)),
            "key_stride": shape.num_key_heads * shape.head_dim,
            "value_stride": shape.num_key_heads * shape.value_dim,
            "group": shape.num_heads // shape.num_key_heads,
            "log2e": math.log2(math.e),
            "ln2": math.log(2.0),
            "log2_scale": shape.scale * math.log2(math.e),
            "shape_text": repr(shape),
        },
    )


@functools.cache
def attention_kernel(shape: AttentionShape, kernel: str, directory: Path | None = None) -> Kernel:
    """Generate (or find) and import one of `KERNELS` for ``shape``."""
    tile = tile_of(shape, kernel)
    loaded = load_kernel(kernel, attention_source(shape, kernel), directory)
    return dataclasses.replace(loaded, num_warps=tile.num_warps, num_stages=tile.num_stages)


class RowIntervals(NamedTuple):
    """Which keys each row sees, int32, on the device of the tensors."""

    low: Tensor
    """[R]."""
    high: Tensor
    """[R]; the row sees keys low to high - 1."""


class KeyLists(NamedTuple):
    """For tiles of keys, which rows see some of each; int32."""

    tiles: Tensor
    """[num_tiles, 5]: first key, first and end of the items, first and end of a run of rows, whole tiles
    of them, that all see all of the keys."""
    items: Tensor
    """[num_items, 2]: first row, end row."""


def launch_forward(
    shape: AttentionShape, q: Tensor, k: Tensor, v: Tensor, intervals: RowIntervals, tiles: Tensor,
    *, every_row: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return (out [R, H, Dv], lse [R, H]): 0 and -inf in a row of a tile that sees no key.

    In a row of no tile, out is arbitrary and lse -inf.

    Args:
        shape: describes q, k and v.
        q: [R, H, D], contiguous, as are k and v.
        k: [S, Hkv, D].
        v: [S, Hkv, Dv].
        intervals: of every row.
        tiles: int32 [num_tiles, 6], covering every row that sees a key once: first row, end row, first key,
            first and end of the keys that all rows of the tile see (whole steps from the first key), end
            of the keys.
        every_row: whether each row is in a tile.
    """
    out = q.new_empty((q.shape[0], shape.num_heads, shape.value_dim))
    lse = q.new_empty((q.shape[0], shape.num_heads), dtype=torch.float32)
    if not every_row:
        lse.fill_(-math.inf)
    kernel = attention_kernel(shape, "attention_forward")
    num_programs = tiles.shape[0] * shape.num_heads
    kernel.launch(num_programs, out, lse, q, k, v, *intervals, tiles, k.shape[0])
    return out, lse


class Cotangent(NamedTuple):
    """What the backward needs of the whole softmax."""

    grad: Tensor
    """[R, H, Dv], contiguous."""
    lse: Tensor
    """[R, H], fp32; +inf where a row sees nothing."""
    delta: Tensor
    """[R, H], fp32: row sums of grad * out."""


def launch_backward_q(
    shape: AttentionShape, q: Tensor, k: Tensor, v: Tensor, cotangent: Cotangent,
    intervals: RowIntervals, tiles: Tensor,
) -> Tensor:  # fmt: skip
    """Return dq [R, H, D]; the tiles cover all rows, the other arguments are as in `launch_forward`."""
    dq = q.new_empty(q.shape)
    kernel = attention_kernel(shape, "attention_backward_q")
    num_programs = tiles.shape[0] * shape.num_heads
    kernel.launch(num_programs, dq, q, k, v, *cotangent, *intervals, tiles, k.shape[0])
    return dq


def launch_backward_kv(
    shape: AttentionShape, q: Tensor, k: Tensor, v: Tensor, cotangent: Cotangent,
    intervals: RowIntervals, lists: KeyLists, onto: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return dk [S, Hkv, D] and dv [S, Hkv, Dv]; the other arguments are as in `launch_forward`.

    Args:
        shape: describes q, k and v.
        q: rows of queries.
        k: keys.
        v: values.
        cotangent: of the rows.
        intervals: of the rows.
        lists: of every tile of keys; with ``onto``, tiles that no row sees may be missing.
        onto: running sums of one dtype, like k and v and contiguous; dk and dv are added to them in place,
            in fp32 and rounded once. Keys of no tile keep their bits.
    """
    if onto is None:
        dk, dv = k.new_empty(k.shape), v.new_empty(v.shape)
    else:
        dk, dv = onto
        shape = dataclasses.replace(shape, sum_dtype=dtype_name(dk.dtype))
    kernel = attention_kernel(shape, "attention_backward_kv")
    num_programs = lists.tiles.shape[0] * shape.num_key_heads
    kernel.launch(num_programs, dk, dv, q, k, v, *cotangent, *intervals, *lists, k.shape[0])
    return dk, dv
