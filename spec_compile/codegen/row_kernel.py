"""Kernels whose programs take one row of logits each, a block of words at a time."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from .kernel import Kernel, load_kernel, render

BLOCK = 4096
"""Words that a program takes at once, a power of two."""
NUM_WARPS = 8


def make_row_kernel(
    template: str, name: str, shape: Any, directory: Path | None, **more: object
) -> Kernel:
    """Generate (or find) and import the kernel ``name``.

    Args:
        template: file that it comes from.
        name: of the kernel.
        shape: dataclass with ``work_dtype`` and ``signature(name)``; the template may use its fields.
        directory: where the generated file goes; None for the default.
        more: what the template asks for besides.
    """
    values = {
        **dataclasses.asdict(shape),
        "name": name,
        "arguments": list(shape.signature(name)),
        "work": f"tl.{shape.work_dtype}",
        "shape_text": repr(shape),
        **more,
    }
    kernel = load_kernel(name, render(template, values), directory)
    return dataclasses.replace(kernel, num_warps=NUM_WARPS)
