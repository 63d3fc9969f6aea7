"""Errors name the user's line, however his forward is called and wherever his project lies."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spec_compile as sc
from spec_compile import Plan, lower
from spec_compile.errors import CaptureError, PlanError
from spec_compile.ir.meta import is_users
from tests.analysis.row_bodies import TARGET, masked, total

PROJECT = """
import torch
import spec_compile as sc

class Draft(torch.nn.Module):
    taps = (0,)

    def __init__(self):
        super().__init__()
        self.mix = torch.nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, inputs):
        h = self.mix(inputs.features)
        if self.branches and h.sum() > 0:
            h = h * 2
        h = centred(h) if not self.loops else h * len(h)
        return sc.DraftOutput((h.sum(-1) * inputs.loss_mask).sum(), inputs.loss_mask.sum())

def centred(h):
    return h - h.mean(0)
"""


@pytest.fixture(params=["spec_compile/mine.py", "torch/spec_compile/mine.py", "plain/mine.py"])
def project(request: pytest.FixtureRequest, tmp_path: Path) -> ModuleType:
    """A user's module in a folder that is named like this package, or like torch."""
    path = tmp_path / request.param
    path.parent.mkdir(parents=True)
    path.write_text(PROJECT)
    spec = importlib.util.spec_from_file_location("mine", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("branches", "loops", "line"),
    [
        (False, False, r"mine\.py:20 in centred: return h - h\.mean\(0\)"),
        (True, False, r"mine\.py:14 in forward: if self\.branches"),
        (False, True, r"mine\.py:16 in forward: h = centred\(h\)"),
    ],
)
def test_a_project_in_a_folder_of_any_name_gets_its_lines(
    project: ModuleType, branches: bool, loops: bool, line: str
) -> None:
    draft = project.Draft()
    draft.branches, draft.loops = branches, loops
    with pytest.raises((PlanError, CaptureError), match=line):
        lower(TARGET, draft, Plan(cp=2, verify=False))


def test_a_helper_and_a_forward_of_another_name_have_lines() -> None:
    class Helped(nn.Module):
        taps = (0,)

        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(8, 8, dtype=torch.float64)

        def between(self, h: Tensor) -> Tensor:
            return (lambda x: self.helper(x))(h)

        def helper(self, h: Tensor) -> Tensor:
            return h - h.mean(0)

        def run(self, inputs: sc.DraftInputs) -> sc.DraftOutput:
            return total(masked(self.between(self.mix(inputs.features)).sum(-1), inputs), inputs)

        forward = run

    with pytest.raises(PlanError, match=r"test_source_lines\.py:\d+ in helper: return h - h\.mean"):
        lower(TARGET, Helped(), Plan(cp=2, verify=False))


def test_an_autocast_region_has_the_line_of_what_it_begins_with() -> None:
    class Cast(nn.Module):
        taps = (0,)

        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(8, 8, dtype=torch.float64)

        def forward(self, inputs: sc.DraftInputs) -> sc.DraftOutput:
            with torch.autocast("cpu", torch.bfloat16):
                h = self.mix(inputs.features)
            return total(masked(h.sum(-1), inputs), inputs)

    match = r"test_source_lines\.py:\d+ in forward: h = self\.mix.*\n.*autocast region"
    with pytest.raises(CaptureError, match=match):
        lower(TARGET, Cast(), Plan(cp=2, verify=False))


def test_a_forward_of_another_name_alone_has_a_line() -> None:
    class Renamed(nn.Module):
        taps = (0,)

        def run(self, inputs: sc.DraftInputs) -> sc.DraftOutput:
            rows: Any = inputs.features.cumsum(0)
            return total(masked(rows.sum(-1), inputs), inputs)

        forward = run

    with pytest.raises(PlanError, match=r"in run: rows: Any = inputs\.features\.cumsum\(0\)"):
        lower(TARGET, Renamed(), Plan(cp=2, verify=False))


def test_files_of_the_package_and_of_torch_are_not_the_users() -> None:
    root = Path(sc.__file__).parent
    for path in ("api.py", "capture/joint.py", "passes/pipeline.py", "runtime/model.py"):
        assert not is_users(str(root / path))
        assert not is_users(str((root / path).resolve()))
    assert not is_users(torch.nn.functional.__file__)
    assert is_users(str(root / "drafts" / "eagle3.py"))  # a draft like a user's
    assert is_users(__file__)
