"""What a draft may give back: everything else is refused while it is captured, and says what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spec_compile as sc

from ..models import tiny_llama


class Returns(nn.Module):
    """Gives back what ``made`` makes of losses [T] and a mask [T]."""

    taps = (1,)

    def __init__(self, made: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.made = made
        self.mix = nn.Linear(32, 3, dtype=torch.float64)

    def forward(self, inputs: sc.DraftInputs) -> Any:
        return self.made(self.mix(inputs.features), inputs.loss_mask)


WRONG: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "a tuple": (lambda x, m: (x.sum(), m.sum()), "DraftOutput, found tuple"),
    "loss of Python": (lambda x, m: sc.DraftOutput(1.0, m.sum()), "loss_sum must be a tensor, found float"),  # type: ignore[arg-type]
    "no count": (lambda x, m: sc.DraftOutput(x.sum(), None), "count must be a tensor, found NoneType"),  # type: ignore[arg-type]
    "loss by row": (lambda x, m: sc.DraftOutput(x.sum(1), m.sum()), "loss_sum has one entry a row"),
    "matrix": (lambda x, m: sc.DraftOutput(x.T @ x, m.sum()), r"vectors \[G\] of equal length, found \(3, 3\)"),
    "count of another length": (lambda x, m: sc.DraftOutput(x.sum(0), m.sum()), r"found \(3,\) and \(\)"),
    "count with a gradient": (lambda x, m: sc.DraftOutput(x.sum(), x.exp().sum()), r"return count.detach\(\)"),
    "changed places": (lambda x, m: sc.DraftOutput(m.sum(), x.sum()), "did it change places"),
    "stats list": (lambda x, m: sc.DraftOutput(x.sum(), m.sum(), [x.sum()]), "stats must be a dict"),  # type: ignore[arg-type]
    "stats None": (lambda x, m: sc.DraftOutput(x.sum(), m.sum(), None), "stats must be a dict"),  # type: ignore[arg-type]
    "stat of Python": (lambda x, m: sc.DraftOutput(x.sum(), m.sum(), {"a": 1}), "a must be a tensor, found int"),  # type: ignore[dict-item]
    "stat vector": (lambda x, m: sc.DraftOutput(x.sum(), m.sum(), {"a": x.sum(0)}), r"like loss_sum \(\), found"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_outputs_that_are_no_sums_are_refused(name: str) -> None:
    made, match = WRONG[name]
    with pytest.raises(sc.CaptureError, match=match) as caught:
        sc.lower(tiny_llama(layers=2, vocab=11), Returns(made), sc.Plan(verify=False))
    assert "Returns" in str(caught.value)
