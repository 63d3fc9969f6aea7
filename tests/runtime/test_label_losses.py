"""Chunked label losses equal their plain body, in values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spec_compile.ir import reference
from spec_compile.runtime import logit_chunks
from spec_compile.runtime.label_losses import chunked_label_losses

R, V, D, E = 37, 29, 6, 3


def leaves(*, extra: bool, dtype: torch.dtype = torch.float64) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(5)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    labels = torch.randint(-1, V, (R,), generator=generator)
    pair = [drawn(R, E), drawn(V, E)] if extra else [None, None]
    tensors = [drawn(R, D), drawn(V, D), drawn(R, D + 1), drawn(V, D + 1), labels, *pair]
    for i in (0, 1, 5, 6):
        part = tensors[i]
        if part is not None:
            part.requires_grad_()
    return tensors


@pytest.mark.parametrize("extra", [False, True])
@pytest.mark.parametrize("which", ["both", "cross-entropy", "distance"])
def test_values_and_gradients(extra: bool, which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logit_chunks, "CHUNK_ELEMENTS", 16 * V // 2)
    mine, plain = leaves(extra=extra), leaves(extra=extra)
    found = chunked_label_losses(*mine)
    wanted = reference.label_losses(*plain)  # type: ignore[arg-type]
    slope = torch.linspace(-1.0, 2.0, R, dtype=torch.float64)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    for result in (found, wanted):
        parts = [slope * result[0], slope.flip(0) * result[1]]
        picked = {"both": parts, "cross-entropy": parts[:1], "distance": parts[1:]}[which]
        torch.stack([part.sum() for part in picked]).sum().backward()
    for ours, theirs in zip(mine, plain, strict=True):
        if theirs is not None and theirs.requires_grad:
            assert ours is not None
            assert theirs.grad is not None
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-11, atol=1e-12)
        elif ours is not None:
            assert ours.grad is None


def test_rows_without_a_label_give_nothing() -> None:
    inputs = leaves(extra=True)
    inputs[4] = torch.full((R,), -1)
    ce, l1 = chunked_label_losses(*inputs)
    assert not ce.any()
    assert not l1.any()
    (ce.sum() + l1.sum()).backward()
    for i in (0, 1, 5, 6):
        part = inputs[i]
        assert part is not None
        assert part.grad is not None
        assert not part.grad.any()


def test_bfloat16_sums_in_float32() -> None:
    inputs = leaves(extra=True, dtype=torch.bfloat16)
    ce, l1 = chunked_label_losses(*inputs)
    wide = [x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs]
    wanted = reference.label_losses(*wide)  # type: ignore[arg-type]
    assert ce.dtype == l1.dtype == torch.float32
    torch.testing.assert_close(ce.double(), wanted[0], rtol=2e-2, atol=5e-2)
    torch.testing.assert_close(l1.double(), wanted[1], rtol=2e-2, atol=5e-2)
