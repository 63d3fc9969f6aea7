"""Documents of a packed row never see one another, whatever the target."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from spec_compile import ParallelModel, Plan
from spec_compile.batch import PackedBatch
from tests.models import tiny_llama, tiny_qwen3
from tests.parallel import run_models

TOKENS = torch.randint(0, 53, (11,), generator=torch.Generator().manual_seed(3))


def row(*offsets: int) -> PackedBatch:
    return PackedBatch(TOKENS, torch.tensor(offsets), torch.ones(11, dtype=torch.bool))


@pytest.mark.parametrize("make", [tiny_qwen3, tiny_llama])
def test_documents_change_the_result_and_stay_apart(make: Any) -> None:
    def body(model: ParallelModel, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        whole, cut = model.logprobs(row(0, 11)), model.logprobs(row(0, 5, 11))
        changed = row(0, 5, 11)
        changed.tokens = TOKENS.clone()
        changed.tokens[:5] = 1
        return whole, cut, model.logprobs(changed)

    target = make(layers=2, vocab=53)
    for whole, cut, changed in run_models(Plan(cp=2, micro_batches=1), target, None, body):
        assert torch.equal(whole[:5], cut[:5])
        assert not torch.allclose(whole[5:], cut[5:])
        assert torch.equal(cut[5:], changed[5:])
