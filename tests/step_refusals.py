"""A call that is refused, and has changed nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from spec_compile import ParallelModel, Plan

from .step_cases import gradients_of

PIPELINE = Plan(cp=2, pp=2, micro_batches=2)
REPLICAS = Plan(cp=2, micro_batches=2)
NAN, INF = float("nan"), float("inf")


def assert_all_equal(one: dict[str, Tensor | None], other: dict[str, Tensor | None]) -> None:
    assert one.keys() == other.keys()
    for name, grad in one.items():
        match = other[name]
        assert (grad is None) == (match is None), name
        assert grad is None or (match is not None and torch.equal(grad, match)), name


def refused(
    model: ParallelModel,
    call: Callable[[], object],
    kind: type[Exception] | tuple[type[Exception], ...],
    match: str,
) -> None:
    """The call raises, and no gradient has changed."""
    before = gradients_of(model)
    with pytest.raises(kind, match=match):
        call()
    assert_all_equal(gradients_of(model), before)
