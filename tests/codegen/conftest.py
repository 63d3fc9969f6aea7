"""What all tests of generated kernels share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def new_memory_holds_nan() -> Iterator[None]:
    """Whatever a kernel leaves unwritten shows as NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
