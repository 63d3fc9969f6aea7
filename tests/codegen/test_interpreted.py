"""Runs `interpreted*.py` where Triton interprets: the variable must be set before triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

HERE = Path(__file__)
STEPS = ("step_matrix", "step_block_options", "step_policy_loss", "public_loss_faults")


def run_interpreted(home: Path, files: Sequence[Path], timeout: float) -> None:
    """Run the quick tests of some files; generated kernels go to ``home``."""
    chosen = ["-m", "not slow", "-q", "-p", "no:cacheprovider", *map(str, files)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *chosen],
        cwd=HERE.parents[2],
        env=os.environ | {"TRITON_INTERPRET": "1", "XDG_CACHE_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_generated_kernels_are_right_under_the_interpreter(tmp_path: Path) -> None:
    run_interpreted(tmp_path, sorted(HERE.parent.glob("interpreted*.py")), timeout=300)
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


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_whole_steps_by_generated_kernels_equal_the_dense_ones(tmp_path: Path) -> None:
    """Shapes that people's models have, such as three query heads a key head, beside those of the tests above."""
    files = [HERE.parents[1] / f"test_{name}.py" for name in STEPS]
    run_interpreted(tmp_path, files, timeout=890)
