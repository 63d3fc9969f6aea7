"""Chunked law losses equal their plain body, in values and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from spec_compile.ir import reference
from spec_compile.runtime import logit_chunks
from spec_compile.runtime.law_losses import chunked_law_losses

R, V, D = 37, 29, 6
COLUMNS = (0, 3, 4, 9, 17, 28)


def leaves(*, reduced: bool, dtype: torch.dtype = torch.float64) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(5)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    columns = torch.tensor(COLUMNS) if reduced else None
    size = len(COLUMNS) if reduced else V
    live = torch.rand(R, generator=generator) < 0.7
    student, weight = drawn(R, D).requires_grad_(), drawn(size, D).requires_grad_()
    return [student, weight, drawn(R, D + 1), drawn(V, D + 1), columns, live]


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("which", ["both", "cross-entropy", "overlap"])
def test_values_and_gradients(reduced: bool, which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logit_chunks, "CHUNK_ELEMENTS", 16 * V // 2)
    mine, plain = leaves(reduced=reduced), leaves(reduced=reduced)
    found = chunked_law_losses(*mine)
    wanted = reference.law_losses(*plain)  # type: ignore[arg-type]
    slope = torch.linspace(-1.0, 2.0, R, dtype=torch.float64)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    for result in (found, wanted):
        parts = [(slope * result[0]).sum(), (slope.flip(0) * result[1]).sum()]
        picked = {"both": parts, "cross-entropy": parts[:1], "overlap": parts[1:]}[which]
        torch.stack(picked).sum().backward()
    for ours, theirs in zip(mine[:2], plain[:2], strict=True):
        assert ours is not None
        assert theirs is not None
        assert theirs.grad is not None
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_side_gets_no_gradient_and_the_other_is_the_same(
    frozen: int, reduced: bool
) -> None:
    mine, plain = leaves(reduced=reduced), leaves(reduced=reduced)
    kept, ours, theirs = mine[frozen], mine[1 - frozen], plain[1 - frozen]
    assert kept is not None
    assert ours is not None
    assert theirs is not None
    kept.requires_grad_(False)
    cases: list[tuple[Any, Any]] = [(chunked_law_losses, mine), (reference.law_losses, plain)]
    for op, tensors in cases:
        ce, overlap, *_ = op(*tensors)
        (ce - 2 * overlap).sum().backward()
    assert kept.grad is None
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-11, atol=1e-12)


def test_acceptance_counts_the_mass_outside_the_draft_vocabulary() -> None:
    inputs: list[Any] = leaves(reduced=True)
    inputs[5] = torch.ones(R, dtype=torch.bool)
    student, weight, teacher, head, _, _ = inputs
    _, overlap, _, known = chunked_law_losses(*inputs)
    q = torch.zeros(R, V, dtype=torch.float64)
    q[:, list(COLUMNS)] = (student @ weight.T).softmax(-1).detach()
    p = (teacher @ head.T).softmax(-1)
    torch.testing.assert_close(overlap, torch.minimum(p, q).sum(-1), rtol=1e-12, atol=1e-12)
    expected = [float(int(row.argmax()) in COLUMNS) for row in p]
    assert known.tolist() == expected
    assert 0 < sum(expected) < R
