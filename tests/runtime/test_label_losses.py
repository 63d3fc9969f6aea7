"""Chunked label losses equal their plain body, in values and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from spec_compile.ir import reference
from spec_compile.runtime import logit_chunks
from spec_compile.runtime.label_losses import chunked_label_losses

R, V, D, E = 37, 29, 6, 3
COLUMNS = torch.tensor([3, 28, 0, 7, 8, 19, 11, 25])
"""Tokens of a reduced vocabulary; in no order."""


def leaves(
    *, extra: bool, dtype: torch.dtype = torch.float64, columns: Tensor | None = None
) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(5)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    labels = torch.randint(-1, V, (R,), generator=generator)
    words = V if columns is None else len(columns)
    pair = [drawn(R, E), drawn(words, E)] if extra else [None, None]
    tensors = [drawn(R, D), drawn(words, D), drawn(R, D + 1), drawn(V, D + 1), labels, *pair]
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


@pytest.mark.parametrize("renormalised", [False, True])
@pytest.mark.parametrize("op", [reference.label_losses, chunked_label_losses])
def test_reduced_vocabulary_is_a_whole_one_without_the_other_tokens(
    op: Any, renormalised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logit_chunks, "CHUNK_ELEMENTS", 16 * V // 2)
    inputs, plain = (leaves(extra=True, columns=COLUMNS) for _ in range(2))
    found = op(*inputs, COLUMNS, renormalised)
    x, head, z, teacher, labels, y, extra_head = (t for t in plain if t is not None)
    logits = torch.full((R, V), float("-inf"), dtype=torch.float64)
    logits[:, COLUMNS] = x @ head.T + y @ extra_head.T
    mask = torch.zeros(V, dtype=torch.float64)
    mask[COLUMNS] = 1
    p = (z @ teacher.T).softmax(1)
    p = p * mask / (p * mask).sum(1, keepdim=True) if renormalised else p
    known = (labels >= 0) & (mask[labels] > 0)
    assert 0 < int(known.sum()) < int((labels >= 0).sum()) < R
    ce = torch.zeros(R, dtype=torch.float64)
    ce[known] = -logits.log_softmax(1)[known, labels[known]]
    l1 = torch.where(labels >= 0, (logits.softmax(1) - p).abs().sum(1), 0.0)
    slope = torch.linspace(-1.0, 2.0, R, dtype=torch.float64)
    torch.testing.assert_close(found[0], ce, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found[1], l1, rtol=1e-12, atol=1e-12)
    for results in (found, (ce, l1)):
        (slope * results[0] + slope.flip(0) * results[1]).sum().backward()
    for ours, theirs in zip(inputs, plain, strict=True):
        if theirs is not None and theirs.requires_grad:
            assert ours is not None
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("columns", [None, COLUMNS])
@pytest.mark.parametrize(
    "frozen", [(0,), (1,), (5,), (6,), (0, 5), (1, 6), (0, 1), (5, 6)], ids=str
)
def test_what_is_frozen_gets_no_gradient_and_the_others_are_the_same(
    frozen: tuple[int, ...], columns: Tensor | None
) -> None:
    inputs, plain = (leaves(extra=True, columns=columns) for _ in range(2))
    for i in frozen:
        part = inputs[i]
        assert part is not None
        part.requires_grad_(False)
    slope = torch.linspace(-1.0, 2.0, R, dtype=torch.float64)
    cases: list[tuple[Any, Any]] = [(chunked_label_losses, inputs), (reference.label_losses, plain)]
    for op, tensors in cases:
        ce, l1 = op(*tensors, columns)
        (slope * ce + slope.flip(0) * l1).sum().backward()
    for i in (0, 1, 5, 6):
        ours, theirs = inputs[i], plain[i]
        assert ours is not None
        assert theirs is not None
        if i in frozen:
            assert ours.grad is None
        else:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("frozen", [(0, 5), (1, 6), (0,), (6,)], ids=str)
def test_no_product_is_made_for_what_is_frozen(frozen: tuple[int, ...]) -> None:
    inputs = leaves(extra=True)
    for i in frozen:
        part = inputs[i]
        assert part is not None
        part.requires_grad_(False)
    ce, _ = chunked_label_losses(*inputs)
    with FlopCounterMode(display=False) as counted:
        ce.sum().backward()
    labels: Any = inputs[4]
    live = int((labels >= 0).sum())
    logits = 2 * live * V * (D + E)
    kept = sum({0: D, 1: D, 5: E, 6: E}[i] for i in (0, 1, 5, 6) if i not in frozen)
    assert counted.get_total_flops() == logits + 2 * live * V * kept


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
