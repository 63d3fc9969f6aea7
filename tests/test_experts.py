"""The expert product against one product a row."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from spec_compile.ir.experts import expert_linear

WIDTHS = (8, 16)


def operands(dtype: torch.dtype, *, transposed: bool, number: int = 5) -> tuple[Tensor, ...]:
    """Rows, weights and biases of five experts, and a choice of two a row that leaves expert 3 out."""
    generator = torch.Generator().manual_seed(0)
    shape = WIDTHS if transposed else WIDTHS[::-1]

    def normal(*size: int) -> Tensor:
        return (
            torch.randn(size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        )

    chosen = torch.tensor([0, 1, 2, 4])[torch.randint(0, 4, (7, 2), generator=generator)]
    return normal(7, 2, WIDTHS[0]), normal(number, *shape), normal(number, WIDTHS[1]), chosen


def by_row(x: Tensor, weight: Tensor, bias: Tensor, chosen: Tensor, *, transposed: bool) -> Tensor:
    """One product after the other."""
    out = torch.zeros(*chosen.shape, bias.shape[1], dtype=torch.float64)
    for t, j in itertools.product(*map(range, chosen.shape)):
        e = chosen[t, j]
        matrix = weight[e].T if transposed else weight[e]
        out[t, j] = matrix.double() @ x[t, j].double() + bias[e].double()
    return out


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 2e-2)])
def test_expert_linear_and_its_gradients_equal_products_by_row(
    dtype: torch.dtype, tolerance: float, transposed: bool
) -> None:
    x, weight, bias, chosen = operands(dtype, transposed=transposed)
    out = expert_linear(x, weight, bias, chosen, transposed)
    expected = by_row(x, weight, bias, chosen, transposed=transposed)
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    upstream = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
    found = torch.autograd.grad(out, [x, weight, bias], upstream.to(dtype))
    wanted = torch.autograd.grad(expected, [x, weight, bias], upstream)
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=2 * tolerance, atol=4 * tolerance)
    assert not found[1][3].any(), "expert 3 has no row"


def test_expert_linear_of_no_rows_is_empty() -> None:
    weight = torch.ones(2, 4, 3, requires_grad=True)
    out = expert_linear(
        torch.ones(0, 2, 3), weight, None, torch.zeros(0, 2, dtype=torch.int64), False
    )
    assert out.shape == (0, 2, 4)
    out.sum().backward()
    assert weight.grad is not None
    assert not weight.grad.any()
