"""The generated kernel that adds up parts of a gradient, each over a range of rows, and puts rows in order."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from .kernel import TRITON_TYPES, Kernel, block_rows, load_kernel, padded, render


@dataclass(frozen=True, kw_only=True)
class SumShape:
    """What one kernel is generated for."""

    part_dtypes: tuple[str, ...]
    out_dtype: str
    num_heads: int
    dim: int
    accumulate: bool = False
    """Add to what is in the output."""
    has_places: bool = False
    """Rows of the output are found in the parts by an index."""

    @property
    def work_dtype(self) -> str:
        """Dtype of the sums."""
        return "float64" if self.out_dtype == "float64" else "float32"

    @property
    def rows(self) -> int:
        """Rows (token, head) that one program takes."""
        return block_rows(self.dim)

    @property
    def ranges(self) -> list[str]:
        """Names of the arguments that say which rows a part has."""
        return [f"{name}{i}" for i in range(len(self.part_dtypes)) for name in ("first", "end")]

    def signature(self) -> dict[str, str]:
        """Triton type of every argument of the kernel, in order."""
        types = {"out_ptr": "*" + TRITON_TYPES[self.out_dtype]}
        if self.has_places:
            types["places_ptr"] = "*i32"
        for i, dtype in enumerate(self.part_dtypes):
            types[f"part{i}_ptr"] = "*" + TRITON_TYPES[dtype]
        return types | dict.fromkeys(self.ranges, "i64") | {"num_rows": "i64"}


@functools.cache
def sum_kernel(shape: SumShape, directory: Path | None = None) -> Kernel:
    """Generate (or find) and import the kernel for ``shape``."""
    values = dataclasses.asdict(shape) | {
        "num_parts": len(shape.part_dtypes),
        "arguments": list(shape.signature()),
        "ranges": [*shape.ranges, "num_rows"],
        "work": f"tl.{shape.work_dtype}",
        "rows": shape.rows,
        "block": padded(shape.dim),
        "shape_text": repr(shape),
    }
    return load_kernel("sum_parts", render("sum_parts.py.jinja", values), directory)


def launch_sum(
    shape: SumShape, out: Tensor, parts: Sequence[tuple[int, Tensor]], places: Tensor | None,
    directory: Path | None = None,
) -> None:  # fmt: skip
    """Write ``out`` [n, H, D], contiguous: the sum of the parts, or add that to it.

    Args:
        shape: describes all tensors.
        out: written in every row.
        parts: (first row, [m, H, D]) each.
        places: int32 [n], the row of the parts that each row of ``out`` is; below 0 for none. None: its own.
        directory: where the generated file goes; None for the default.
    """
    ranges = [x for first, part in parts for x in (first, first + part.shape[0])]
    tensors = [*([] if places is None else [places]), *(part.contiguous() for _, part in parts)]
    kernel = sum_kernel(shape, directory)
    num_programs = -(-out.shape[0] * shape.num_heads // shape.rows)
    kernel.launch(num_programs, out, *tensors, *ranges, out.shape[0])
