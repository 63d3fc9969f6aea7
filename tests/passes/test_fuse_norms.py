"""Written RMSNorms become one node with the same values; what only looks like one stays."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from spec_compile import Plan, lower
from spec_compile.drafts import Eagle3
from spec_compile.passes.canonicalize import Canonicalize
from spec_compile.passes.fuse_norms import FuseNorms
from tests.step_cases import TARGETS

aten = torch.ops.aten
EPS = 1e-3
Form = Callable[[Tensor, Tensor], Tensor]


def rounded_before_the_weight(x: Tensor, w: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return w * wide.to(x.dtype)


def rounded_after_the_weight(x: Tensor, w: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    return (w * wide).to(x.dtype)


def one_plus_the_weight(x: Tensor, w: Tensor) -> Tensor:
    wide = x.float()
    wide = torch.rsqrt((wide * wide).mean(x.dim() - 1, True) + EPS) * wide
    return (wide * (1.0 + w.float())).type_as(x)


def without_casts(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + EPS) * w


FORMS = (rounded_before_the_weight, rounded_after_the_weight, one_plus_the_weight, without_casts)


class Written(nn.Module):
    """A form as a module."""

    def __init__(self, form: Callable[..., Any]) -> None:
        super().__init__()
        self.form = form

    def forward(self, x: Tensor, w: Tensor) -> Any:
        return self.form(x, w)


def captured(form: Callable[..., Any], x: Tensor, w: Tensor) -> GraphModule:
    gm = torch.export.export(Written(form), (x, w)).module(check_guards=False)
    assert isinstance(gm, GraphModule)
    return Canonicalize()(gm).gm


def operands(dtype: torch.dtype, device: str = "cpu", rows: int = 5) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, 3, 24).to(device, dtype)
    x[0] = 0  # a dead row
    return x.requires_grad_(), torch.randn(24).to(device, dtype).requires_grad_()


def results(fn: Callable[..., Tensor], x: Tensor, w: Tensor, grad: Tensor) -> list[Tensor]:
    out = fn(x, w)
    return [out.detach(), *torch.autograd.grad(out, (x, w), grad)]


def targets(gm: GraphModule) -> list[Any]:
    return [node.target for node in gm.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        *itertools.product(FORMS, (torch.float64, torch.float32)),
        *itertools.product(FORMS[:3], (torch.bfloat16, torch.float16)),
    ],
)
def test_a_written_norm_is_one_node_with_the_same_values(form: Form, dtype: torch.dtype) -> None:
    x, w = operands(dtype)
    grad = torch.randn(x.shape).to(dtype)
    wanted = results(form, x, w, grad)
    gm = captured(form, x, w)
    assert FuseNorms()(gm).changes == 1
    gm.recompile()
    assert targets(gm).count(aten.rms_norm.default) == 1
    assert aten.rsqrt.default not in targets(gm)
    for found, want in zip(results(gm, x, w, grad), wanted, strict=True):
        torch.testing.assert_close(found, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_casts_to_fp32_and_back_go_where_they_enclose_the_norm_alone(dtype: torch.dtype) -> None:
    x, w = operands(dtype)
    for form, expected in zip(FORMS[:3], (0, 2, 3), strict=True):
        gm = captured(form, x, w)
        FuseNorms()(gm)
        casts = [t for t in targets(gm) if "to" in str(t) or "type_as" in str(t)]
        assert len(casts) == expected, (form.__name__, casts)


def test_a_cast_to_fewer_bits_stays() -> None:
    x, w = operands(torch.float64)
    gm = captured(rounded_before_the_weight, x, w)
    FuseNorms()(gm)
    assert targets(gm).count(aten.to.dtype) == 2  # the form computes in fp32


def another_dimension(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + EPS) * w


def another_operand(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt((x * w).pow(2).mean(-1, keepdim=True) + EPS)


def another_power(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + EPS) * w


def a_sum(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + EPS) * w


def a_tensor_for_eps(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + w)


def scaled_eps(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(torch.add(x.pow(2).mean(-1, keepdim=True), EPS, alpha=2)) * w


def a_second_reader(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
    return x * scale * w, scale


def a_number(x: Tensor, w: Tensor) -> Tensor:
    total = x.sum()
    return w * (total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + EPS))


@pytest.mark.parametrize(
    "form",
    [
        another_dimension, another_operand, another_power, a_sum, a_tensor_for_eps, scaled_eps,
        a_second_reader, a_number,
    ],
)  # fmt: skip
def test_what_only_looks_like_a_norm_stays(form: Callable[..., Any]) -> None:
    gm = captured(form, *operands(torch.float32))
    before = targets(gm)
    assert FuseNorms()(gm).changes == 0
    assert targets(gm) == before


def test_a_norm_in_a_half_type_keeps_its_roundings() -> None:
    gm = captured(without_casts, *operands(torch.bfloat16))
    assert FuseNorms()(gm).changes == 0


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss", "gemma3"])
def test_no_norm_of_a_target_or_draft_is_left_written(name: str) -> None:
    target = TARGETS[name]()
    lowered = lower(target, Eagle3.from_target(target, ttt_length=2), Plan(cp=2))
    nodes = targets(lowered.graphs["stage0"])
    assert aten.rsqrt.default not in nodes
    assert nodes.count(aten.rms_norm.default) > 2 * target.config.num_hidden_layers


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS[:3])
def test_a_norm_on_a_gpu_is_as_close_to_float64_as_the_written_one(form: Form) -> None:
    x, w = operands(torch.bfloat16, "cuda", rows=257)
    grad = torch.randn(x.shape, device="cuda").to(torch.bfloat16)
    gm = captured(form, x, w)
    FuseNorms()(gm)
    gm.recompile()
    wide = [t.detach().double().requires_grad_() for t in (x, w)]
    exact = results(without_casts, wide[0], wide[1] + (form is one_plus_the_weight), grad.double())
    written = results(form, x, w, grad)
    for found, other, want in zip(results(gm, x, w, grad), written, exact, strict=True):
        gap = (other.double() - want).abs().max()
        assert (found.double() - want).abs().max() <= 1.5 * gap + 1e-6
