"""Runs `interpreted*.py` where Triton interprets: the variable must be set before triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_generated_kernels_are_right_under_the_interpreter(tmp_path: Path) -> None:
    here = Path(__file__)
    files = map(str, sorted(here.parent.glob("interpreted*.py")))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files],
        cwd=here.parents[2],
        env=os.environ | {"TRITON_INTERPRET": "1", "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    made = (tmp_path / "spec_compile" / "kernels").iterdir()
    assert {file.name.rsplit("_", 1)[0] for file in made} == {
        "attention_backward_kv",
        "attention_backward_q",
        "attention_forward",
        "block_backward",
        "diagonal_backward",
        "draft_label_gradient",
        "draft_label_sweep",
        "draft_law_gradient",
        "draft_law_sweep",
        "label_gradient",
        "label_sweep",
        "merge_block",
        "merge_partials",
        "row_dot",
        "soft_gradient",
        "soft_sweep",
        "sum_parts",
    }
