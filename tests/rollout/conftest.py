"""Tiny models are fastest on one thread."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread(fixed_seed: None) -> None:
    """`fixed_seed` gives the count back afterwards."""
    torch.set_num_threads(1)
