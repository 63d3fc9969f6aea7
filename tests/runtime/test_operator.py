"""Operators in Python: gradients through lists, defaults, refusals, fake values, and torch's own check."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from spec_compile.errors import InvariantError
from spec_compile.ir.operator import operator
from spec_compile.runtime import vocabulary  # noqa: F401  registers the losses

seen: dict[str, Any] = {}


@operator("test_weighted_sum")
def weighted_sum(
    x: Tensor, parts: list[Tensor], factor: float, shift: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``x + factor * sum(parts) + shift``, and the number of parts."""
    total = x.clone()
    for part in parts:
        total += factor * part
    return total if shift is None else total + shift, torch.tensor(float(len(parts)))


@weighted_sum.register_fake
def _(x: Tensor, parts: list[Tensor], factor: float, shift: Tensor | None = None) -> Any:
    return torch.empty_like(x), x.new_empty(())


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    seen["inputs"] = inputs
    seen["needed at first"] = ctx.needs_input_grad
    _, parts, ctx.factor, _ = inputs
    ctx.number = len(parts)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, unused: Tensor | None) -> tuple[Any, ...]:
    seen["needed"] = ctx.needs_input_grad
    more = seen.get("more", 0)
    return grad, [ctx.factor * grad] * (ctx.number + more), None, grad


weighted_sum.register_autograd(_backward, setup_context=_setup)


@operator("test_without_gradient")
def without_gradient(x: Tensor) -> Tensor:
    """``x + 1``."""
    return x + 1


@without_gradient.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@operator("test_one_less")
def one_less(x: Tensor, by: float = 1.0) -> Tensor:
    """``x - by``; its backward returns as many gradients as it is told."""
    return x - by


one_less.register_autograd(lambda ctx, grad: (grad, None, None)[: seen["number"]])


def test_gradients_reach_every_tensor_of_a_list() -> None:
    x, *parts = (torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(4))
    inputs = (x, *parts)
    assert torch.autograd.gradcheck(
        lambda x, *parts: torch.ops.spec_compile.test_weighted_sum(x, list(parts), 0.5)[0], inputs
    )


def test_needs_input_grad_has_the_form_of_the_arguments() -> None:
    x, part = torch.randn(3), torch.randn(3, requires_grad=True)
    weighted_sum(x, [x, part], 2.0)[0].sum().backward()
    assert seen["needed at first"] == seen["needed"] == (False, [False, True], False)
    torch.testing.assert_close(part.grad, torch.full((3,), 2.0))


def test_a_default_that_was_left_out_is_among_the_inputs() -> None:
    x = torch.randn(3, requires_grad=True)
    weighted_sum(x, [], 2.0)
    assert len(seen["inputs"]) == 4
    assert seen["inputs"][3] is None


def test_no_node_is_made_where_no_gradient_can_come() -> None:
    x = torch.randn(3, requires_grad=True)
    assert weighted_sum(x.detach(), [], 1.0)[0].grad_fn is None
    with torch.no_grad():
        assert weighted_sum(x, [], 1.0)[0].grad_fn is None


def test_a_gradient_that_comes_to_an_operator_without_one_is_refused() -> None:
    x = torch.randn(3, requires_grad=True)
    with pytest.raises(InvariantError, match="test_without_gradient has no gradient"):
        without_gradient(x).sum().backward()


def test_a_node_of_the_graph_has_the_name_of_its_operator() -> None:
    x = torch.randn(3, requires_grad=True)
    for output, name in ((weighted_sum(x, [], 1.0)[0], "weighted_sum"), (one_less(x), "one_less")):
        assert output.grad_fn.name() == f"test_{name}Backward"


@pytest.mark.parametrize("number", [0, 1, 3])
def test_a_wrong_number_of_gradients_is_refused(number: int) -> None:
    seen["number"] = number
    x = torch.randn(3, requires_grad=True)
    expected = f"test_one_less must return one gradient an argument, 2, found {number}"
    with pytest.raises(InvariantError, match=expected):
        one_less(x).sum().backward()


def test_a_wrong_number_of_gradients_for_a_list_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(seen, "more", 1)
    x = torch.randn(3, requires_grad=True)
    with pytest.raises(InvariantError, match="test_weighted_sum must return one gradient a tensor"):
        weighted_sum(x, [x], 1.0)[0].sum().backward()


def test_torch_finds_a_well_made_operator() -> None:
    x, parts = torch.randn(3, requires_grad=True), [torch.randn(3, requires_grad=True)]
    checked = torch.library.opcheck(weighted_sum.overload, (x, parts, 0.5))
    assert set(checked.values()) == {"SUCCESS"}


def test_torch_finds_a_well_made_loss() -> None:
    student, weight = (torch.randn(n, 4, requires_grad=True) for n in (5, 7))
    teacher, head = torch.randn(5, 4), torch.randn(7, 4)
    needed = torch.tensor([True, False, True, True, False])
    overload = torch.ops.spec_compile.chunked_soft_cross_entropy.default
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    checked = torch.library.opcheck(
        overload, (student, weight, teacher, head, needed), test_utils=checks
    )
    assert set(checked.values()) == {"SUCCESS"}
