"""What every test starts from: fixed seeds, and a reason to skip where hardware or a package lacks."""

from __future__ import annotations

import importlib.util
import os
import random
from collections.abc import Iterator

import hypothesis
import numpy as np
import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Examples are drawn the same way in every run; shared machines make time limits per example flaky.
hypothesis.settings.register_profile(
    "project", deadline=None, derandomize=True, max_examples=50, print_blob=True
)
hypothesis.settings.load_profile("project")

PEERS = ("speculators", "specforge")
"""What a `peers` mark without arguments asks for."""


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs unless ``-m`` asks for `gpu` tests: with one, autograd cannot run in forked ranks."""
    if "gpu" not in config.getoption("markexpr").replace("not gpu", ""):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip `gpu` tests without a CUDA device, `nixl` and `peers` tests without those packages."""
    no_gpu = not torch.cuda.is_available()
    no_nixl = importlib.util.find_spec("nixl_cu13") is None
    for item in items:
        if no_gpu and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        if no_nixl and item.get_closest_marker("nixl"):
            item.add_marker(pytest.mark.skip(reason="not installed: nixl-cu13"))
        mark = item.get_closest_marker("peers")
        names = () if mark is None else mark.args or PEERS
        missing = [name for name in names if importlib.util.find_spec(name) is None]
        if missing:
            item.add_marker(pytest.mark.skip(reason=f"not installed: {', '.join(missing)}"))


@pytest.fixture(autouse=True)
def fixed_seed() -> Iterator[None]:
    """Seed every generator, and give each test one thread, which is fastest for tiny models, and fp32."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    if torch.get_num_threads() != 1:
        torch.set_num_threads(1)
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)
