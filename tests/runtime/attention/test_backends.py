"""The declared contract of every attention backend, and the choice among them."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from torch import Tensor

from spec_compile.errors import ConfigError
from spec_compile.runtime.attention import products
from spec_compile.runtime.attention.backends import BACKENDS, backend_for, fallbacks
from spec_compile.runtime.attention.merges import merge_backend

CPU = torch.device("cpu")


def reference(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("rhd,shd->rhs", q, k) * 0.3
    scores = scores.masked_fill(~visible[:, None], -math.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp().masked_fill(~visible[:, None], 0.0)
    return torch.einsum("rhs,shd->rhd", weights, v), lse


@pytest.mark.parametrize("name", ["aten_cpu", "math"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("dim", [16, 48, 80])
@pytest.mark.parametrize("kind", ["full", "causal", "masked"])
def test_a04_forward_and_backward_given_the_merged_result(
    name: str, heads: tuple[int, int], dim: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of the softmax is a second, fixed part."""
    monkeypatch.setattr(products, "SCORES_PER_CHUNK", 100)
    rows, keys = 13, 13 if kind == "causal" else 17
    q = torch.randn(rows, heads[0], dim, dtype=torch.float64, requires_grad=True)
    k, v = (
        torch.randn(keys, heads[1], dim, dtype=torch.float64, requires_grad=True) for _ in range(2)
    )
    visible = torch.ones(rows, keys, dtype=torch.bool)
    if kind == "causal":
        visible = visible.tril()
    if kind == "masked":
        visible = torch.rand(rows, keys) < 0.5
        visible[4] = False
    mask = torch.zeros(rows, keys, dtype=torch.float64).masked_fill(~visible, -math.inf)
    options = {
        "mask": mask if kind == "masked" else None, "causal": kind == "causal", "scale": 0.3
    }  # fmt: skip
    backend = BACKENDS[name]
    out, lse = backend.forward(q.detach(), k.detach(), v.detach(), **options)  # type: ignore[arg-type]
    want, want_lse = reference(q, k, v, visible)
    seen = visible.any(1)
    torch.testing.assert_close(out[seen], want[seen], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(lse, want_lse, rtol=1e-10, atol=1e-10)
    assert (out[~seen] == 0).all()

    rest, rest_lse = torch.randn_like(want), torch.randn_like(want_lse)
    grad = torch.randn_like(want)
    total = torch.logaddexp(want_lse, rest_lse)
    share = (want_lse - total).exp()[..., None]
    whole = share * want + (rest_lse - total).exp()[..., None] * rest
    grads = torch.autograd.grad((whole * grad)[seen].sum(), [q, k, v])
    # a row that sees nothing anywhere comes with +inf
    merged = total.detach().masked_fill(~seen[:, None], math.inf)
    got = backend.backward(
        grad, q.detach(), k.detach(), v.detach(), whole.detach(), merged, **options  # type: ignore[arg-type]
    )  # fmt: skip
    for part, expected in zip(got, grads, strict=True):
        torch.testing.assert_close(part, expected, rtol=1e-10, atol=1e-10)


def test_auto_takes_the_kernel_where_it_can_and_says_where_it_cannot(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert backend_for(CPU, torch.float32, 64, 64) == "aten_cpu"
    with caplog.at_level(logging.WARNING):
        assert backend_for(CPU, torch.float32, 63, 31) == "math"
        assert backend_for(CPU, torch.float32, 63, 31) == "math"
    assert len([r for r in caplog.records if "63 for keys and 31" in r.getMessage()]) == 1
    assert any("63 for keys and 31" in text for text in fallbacks())
    assert backend_for(torch.device("cuda"), torch.bfloat16, 64, 64) == "math"


@pytest.mark.parametrize(
    ("requested", "dims", "message"),
    [
        ("aten_cpu", (63, 31), "63 for keys and 31"),
        ("flash", (64, 64), "aten_cpu, math"),
        ("cudnn", (64, 64), "runs on cuda"),
    ],
)
def test_a_forced_backend_that_cannot_serve_is_refused(
    requested: str, dims: tuple[int, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        backend_for(CPU, torch.float32, *dims, requested)


def test_a_forced_backend_serves() -> None:
    assert backend_for(CPU, torch.float32, 64, 64, "math") == "math"


def test_merges_fall_back_to_tensor_code_on_cpu_and_never_when_forced() -> None:
    assert merge_backend(CPU) == "aten"
    assert any("not Triton" in text for text in fallbacks())
    assert merge_backend(CPU, "aten") == "aten"
    with pytest.raises(ConfigError, match="TRITON_INTERPRET"):
        merge_backend(CPU, "triton")
    with pytest.raises(ConfigError, match="'auto', 'aten' or 'triton'"):
        merge_backend(CPU, "cutlass")
