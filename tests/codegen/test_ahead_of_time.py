"""Every template compiles for the GPUs that it is meant for, without one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Triton interprets or compiles for the whole life of a process, so compiling has one of its own.
SCRIPT = """
import dataclasses
import sys
from spec_compile.codegen.attention import KERNELS, AttentionShape, attention_kernel
from spec_compile.codegen.block_branch import BlockShape, block_kernel
from spec_compile.codegen.diagonal import DiagonalShape, diagonal_kernel
from spec_compile.codegen.draft_law import DraftLawShape, draft_law_kernel
from spec_compile.codegen.kernel import compile_ahead
from spec_compile.codegen.label_law import LabelLawShape, label_law_kernel
from spec_compile.codegen.merge import MergeShape, merge_kernel
from spec_compile.codegen.soft_law import SoftLawShape, soft_law_kernel
from spec_compile.codegen.sum_parts import SumShape, sum_kernel

merges = [
    MergeShape(partial_dtypes=("bfloat16",) * 2, num_heads=9, value_dim=64, out_dtype="bfloat16"),
    MergeShape(
        partial_dtypes=("float32", "bfloat16", "bfloat16"), num_heads=8, value_dim=80,
        out_dtype="bfloat16", num_diagonals=3, num_key_heads=2, head_dim=96, diagonal_dtype="bfloat16",
        sinks_dtype="float32", scale=0.3,
    ),
    MergeShape(partial_dtypes=("float64",), num_heads=2, value_dim=48, out_dtype="float64", sinks_dtype="float64"),
]
diagonals = [
    DiagonalShape(
        num_heads=9, num_key_heads=3, head_dim=96, value_dim=80, dtype="bfloat16", scale=0.3, num_branches=3
    ),
    DiagonalShape(num_heads=4, num_key_heads=4, head_dim=48, value_dim=48, dtype="float64", scale=1.0),
]
sums = [
    SumShape(part_dtypes=("bfloat16", "float32"), out_dtype="bfloat16", num_heads=8, dim=80, has_places=True),
    SumShape(part_dtypes=("bfloat16",), out_dtype="float32", num_heads=8, dim=128, accumulate=True),
]
attentions = [
    AttentionShape(num_heads=8, num_key_heads=2, head_dim=d, value_dim=v, dtype="bfloat16", scale=0.1)
    for d, v in ((128, 128), (80, 48))
]
blocks = [
    BlockShape(
        num_heads=8, num_key_heads=2, head_dim=d, value_dim=v, dtype="bfloat16", scale=0.1, rows=size,
        keys=size, partial_dtypes=("bfloat16", "float32"), sinks_dtype="float32", out_dtype="bfloat16",
    )
    for d, v, size in ((128, 128, 16), (80, 48, 7))
]

def compiled(kernel, signature, capability):
    products = compile_ahead(kernel, signature, capability, kernel.num_warps)
    assert f".target sm_{capability}" in products["ptx"] and products["cubin"]
    return products["ptx"]

capability = int(sys.argv[1])
for shape in attentions:
    for name in KERNELS:
        text = compiled(attention_kernel(shape, name), shape.signature(name), capability)
        # the matrix instructions of each generation
        assert {80: "mma.sync", 90: "wgmma", 100: "tcgen05"}[capability] in text, name
for shape, sums_in in zip(attentions, ("bfloat16", "float32")):
    running = dataclasses.replace(shape, sum_dtype=sums_in)
    kernel = attention_kernel(running, "attention_backward_kv")
    compiled(kernel, running.signature("attention_backward_kv"), capability)
for shape in blocks:
    for name in ("merge_block", "block_backward"):
        assert "mma" in compiled(block_kernel(shape, name), shape.signature(name), capability)
laws = [
    (label_law_kernel, LabelLawShape(dtype=dtype, with_entropy=dtype == "bfloat16"), ("label_sweep", "label_gradient"))
    for dtype in ("bfloat16", "float64")
] + [
    (soft_law_kernel, SoftLawShape(q_dtype=q, p_dtype=p), ("soft_sweep", "soft_gradient"))
    for q, p in (("bfloat16", "float32"), ("float64", "float64"))
]
drafts = {
    "label": [
        DraftLawShape(q_dtype="bfloat16", p_dtype="bfloat16", extra_dtype="bfloat16"),
        DraftLawShape(q_dtype="float64", p_dtype="float64", has_columns=True),
    ],
    "law": [DraftLawShape(q_dtype="bfloat16", p_dtype="float32", has_columns=True)],
}
laws += [
    (draft_law_kernel, shape, (f"draft_{kind}_sweep", f"draft_{kind}_gradient"))
    for kind, shapes in drafts.items() for shape in shapes
]
laws.append((draft_law_kernel, DraftLawShape(q_dtype="bfloat16"), ("draft_label_gradient",)))
for kernel, shape, names in laws:
    for name in names:
        compiled(kernel(shape, name), shape.signature(name), capability)
for kernel, shapes in ((merge_kernel, merges), (diagonal_kernel, diagonals), (sum_kernel, sums)):
    for shape in shapes:
        compiled(kernel(shape), shape.signature(), capability)
"""

BROKEN = """
from pathlib import Path
import sys
from spec_compile.codegen.kernel import compile_ahead, load_kernel
from spec_compile.errors import CodegenError

source = "import triton\\n@triton.jit\\ndef broken(x_ptr):\\n    no_such_name(x_ptr)\\n"
kernel = load_kernel("broken", source, Path(sys.argv[1]))
try:
    compile_ahead(kernel, {"x_ptr": "*fp32"}, 90)
except CodegenError as error:
    assert str(kernel.path) in str(error) and "sm_90" in str(error)
else:
    raise SystemExit("compiled")
"""


def run(script: str, argument: str, home: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"XDG_CACHE_HOME": str(home), "TRITON_CACHE_DIR": str(home / "triton")}
    done = subprocess.run(
        [sys.executable, "-c", script, argument], cwd=Path(__file__).parents[2], env=env,
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]


@pytest.mark.parametrize(
    "capability",
    [pytest.param("80", marks=pytest.mark.slow), "90", pytest.param("100", marks=pytest.mark.slow)],
)
def test_every_template_compiles_for_three_generations_of_gpus(
    capability: str, tmp_path: Path
) -> None:
    run(SCRIPT, capability, tmp_path)


def test_a_kernel_that_does_not_compile_names_its_file(tmp_path: Path) -> None:
    run(BROKEN, str(tmp_path), tmp_path)
