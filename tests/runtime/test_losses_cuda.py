"""Losses over the vocabulary by generated kernels on a GPU, in several chunks, against float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from spec_compile.ir import reference
from spec_compile.runtime import logit_chunks
from spec_compile.runtime.kernels import REGISTERED

pytestmark = pytest.mark.gpu
assert REGISTERED, "the operators are there"
ops = torch.ops.spec_compile

TOKENS, WORDS, DIM = 301, 5003, 64
"""No multiple of a block, of a tile of rows, or of 16 bytes."""
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Relative error in norm. Logits are rounded to the dtype of the products, which turns the sign of some q - p."""
Losses = Callable[[Sequence[Tensor]], Tensor]


@pytest.fixture(autouse=True, params=["several chunks", "one chunk"])
def _chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "several chunks":
        monkeypatch.setattr(logit_chunks, "CHUNK_ELEMENTS", 1 << 15)
        monkeypatch.setattr(logit_chunks, "GPU_CHUNK_TOKENS", 128)


def leaves_in(dtype: torch.dtype) -> list[Tensor]:
    """Student, its head, target, its head."""
    made = [torch.randn(n, DIM, device="cuda") for n in (TOKENS, WORDS, TOKENS, WORDS)]
    return [(x * DIM**-0.25).to(dtype) for x in made]


def check(dtype: torch.dtype, losses: Losses, expected: Losses) -> None:
    """Compare values and gradients of both first leaves; and a second call, bit by bit."""
    leaves = leaves_in(dtype)
    found = []
    for kind, body in ((dtype, losses), (dtype, losses), (torch.float64, expected)):
        mine = [x.to(kind).requires_grad_(i < 2) for i, x in enumerate(leaves)]
        value = body(mine)
        # a sum's gradient is one number that all rows share
        found.append((value.detach(), *torch.autograd.grad(value.sum(), mine[:2])))
    got, again, want = found
    for first, second in zip(got, again, strict=True):
        assert torch.equal(first, second)
    for part, exact in zip(got, want, strict=True):
        error = (part.double() - exact).norm() / exact.norm()
        assert error < BOUNDS[dtype], error


def labels_with_dead_rows() -> Tensor:
    labels = torch.randint(0, WORDS, (TOKENS,), device="cuda")
    labels[::7] = -1
    return labels


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("bonus", [0.0, 0.3])
@pytest.mark.parametrize("on_host", [False, True])
def test_logprobs_and_entropy(dtype: torch.dtype, bonus: float, on_host: bool) -> None:
    labels = labels_with_dead_rows()
    heat = torch.tensor(0.8, device="cpu" if on_host else "cuda")

    def mix(logprobs: Tensor, entropy: Tensor, *unused: Tensor) -> Tensor:
        return logprobs + bonus * entropy if bonus else logprobs

    check(
        dtype,
        lambda x: mix(*ops.chunked_token_logprobs(*x[:2], labels, heat)),
        lambda x: mix(*reference.token_logprobs(x[0], x[1], labels, heat.to("cuda").double())),
    )


@pytest.mark.parametrize("dtype", BOUNDS)
def test_soft_cross_entropy(dtype: torch.dtype) -> None:
    check(
        dtype,
        lambda x: ops.chunked_soft_cross_entropy(*x, None)[0],
        lambda x: reference.soft_cross_entropy(x[0], x[1], x[2], x[3])[0],
    )


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("columns", [False, True])
def test_label_and_law_losses(dtype: torch.dtype, columns: bool) -> None:
    labels = labels_with_dead_rows()
    live = labels >= 0
    some = torch.randperm(WORDS, device="cuda")[: WORDS // 3] if columns else None

    def head(x: Sequence[Tensor]) -> Tensor:
        return x[1] if some is None else x[1][some]

    check(
        dtype,
        lambda x: both(ops.chunked_label_losses(
            x[0], head(x), x[2], x[3], labels, None, None, some, False)),
        lambda x: both(reference.label_losses(
            x[0], head(x), x[2], x[3], labels, None, None, some, False)),
    )  # fmt: skip
    check(
        dtype,
        lambda x: both(ops.chunked_law_losses(x[0], head(x), x[2], x[3], some, live)),
        lambda x: both(reference.law_losses(x[0], head(x), x[2], x[3], some, live)),
    )


def both(values: Sequence[Tensor]) -> Tensor:
    """The two that carry gradients."""
    return values[0] + values[1]
