"""Chunked losses against the plain float64 bodies, whatever the chunks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from spec_compile.ir import reference
from spec_compile.runtime import logit_chunks, vocabulary  # noqa: F401  registers the ops

ops = torch.ops.spec_compile
TOKENS, WORDS, DIM = 13, 37, 8


@pytest.fixture(
    autouse=True, params=[(1 << 23, 1024), (40, 4), (7, 3), (1, 1)], ids=["whole", "40", "7", "1"]
)
def _chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logit_chunks, "CHUNK_ELEMENTS", request.param[0])
    monkeypatch.setattr(logit_chunks, "CHUNK_TOKENS", request.param[1])


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).requires_grad_()


def grads_of(
    outputs: tuple[Tensor, ...], weights: list[Tensor], leaves: list[Tensor]
) -> list[Tensor]:
    total = sum((out * w).sum() for out, w in zip(outputs, weights, strict=False))
    assert isinstance(total, Tensor)
    return list(torch.autograd.grad(total, leaves))


def labels_with_dead_rows() -> Tensor:
    labels = torch.randint(0, WORDS, (TOKENS,))
    labels[::4] = -1
    return labels


@pytest.mark.parametrize("heat", [1.0, 0.7])
@pytest.mark.parametrize("used", ["logprobs", "entropy", "both"])
def test_token_logprobs_and_their_gradients(used: str, heat: float) -> None:
    hidden, weight, labels = draw(TOKENS, DIM), draw(WORDS, DIM), labels_with_dead_rows()
    temperature = torch.tensor(heat, dtype=torch.float64)
    weights = [torch.randn(TOKENS, dtype=torch.float64) for _ in range(2)]
    if used != "both":
        weights[0 if used == "entropy" else 1].zero_()
    want = reference.token_logprobs(hidden, weight, labels, temperature)
    logprobs, entropy, lse = ops.chunked_token_logprobs(hidden, weight, labels, temperature)
    torch.testing.assert_close((logprobs, entropy), want)
    torch.testing.assert_close(lse, (hidden @ weight.T / heat).logsumexp(-1))
    got = grads_of((logprobs, entropy), weights, [hidden, weight])
    torch.testing.assert_close(got, grads_of(want, weights, [hidden, weight]))


def test_rows_without_a_label_are_exactly_zero_with_zero_gradient() -> None:
    hidden, weight, labels = draw(TOKENS, DIM), draw(WORDS, DIM), labels_with_dead_rows()
    dead = labels < 0
    with torch.no_grad():
        hidden[dead] *= 1e4
    logprobs, entropy, _ = ops.chunked_token_logprobs(hidden, weight, labels, torch.tensor(1.0))
    assert (logprobs[dead] == 0).all()
    assert (entropy[dead] == 0).all()
    (grad,) = torch.autograd.grad((logprobs + entropy).sum(), hidden)
    assert (grad[dead] == 0).all()
    assert (grad[~dead] != 0).any()


def test_soft_cross_entropy_and_its_gradients() -> None:
    student, student_weight = draw(TOKENS, DIM), draw(WORDS, DIM)
    teacher, teacher_weight = draw(TOKENS, 5), draw(WORDS, 5)
    weights = [torch.randn(TOKENS, dtype=torch.float64)]
    want = reference.soft_cross_entropy(student, student_weight, teacher, teacher_weight)
    loss, overlap, student_lse, teacher_lse = ops.chunked_soft_cross_entropy(
        student, student_weight, teacher, teacher_weight
    )
    torch.testing.assert_close((loss, overlap), want)
    torch.testing.assert_close(student_lse, (student @ student_weight.T).logsumexp(-1))
    torch.testing.assert_close(teacher_lse, (teacher @ teacher_weight.T).logsumexp(-1))
    assert not overlap.requires_grad
    (loss * weights[0]).sum().backward()
    got = [student.grad, student_weight.grad]
    torch.testing.assert_close(got, grads_of((want[0],), weights, [student, student_weight]))
    assert teacher.grad is None
    assert teacher_weight.grad is None


@pytest.mark.parametrize("kept", [0, 1, 5, TOKENS])
def test_rows_not_needed_are_zero_and_the_others_as_before(kept: int) -> None:
    leaves = [draw(TOKENS, DIM), draw(WORDS, DIM)]
    teacher, teacher_weight = draw(TOKENS, 5), draw(WORDS, 5)
    needed = torch.zeros(TOKENS, dtype=torch.bool)
    needed[torch.randperm(TOKENS)[:kept]] = True
    with torch.no_grad():
        leaves[0][~needed] = torch.nan
    weights = [torch.randn(TOKENS, dtype=torch.float64)]
    clean = [torch.nan_to_num(leaves[0]), leaves[1]]
    dense = reference.soft_cross_entropy(clean[0], clean[1], teacher, teacher_weight)
    want = tuple(torch.where(needed, value, 0.0) for value in dense)
    got = ops.chunked_soft_cross_entropy(*leaves, teacher, teacher_weight, needed)
    torch.testing.assert_close(got[:2], want)
    grads = grads_of((want[0],), weights, clean)
    torch.testing.assert_close(grads_of((got[0],), weights, leaves), grads)


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_side_gets_no_gradient_and_the_other_is_the_same(frozen: int) -> None:
    leaves, labels = [draw(TOKENS, DIM), draw(WORDS, DIM)], labels_with_dead_rows()
    outputs = ops.chunked_token_logprobs(*leaves, labels, torch.tensor(1.0))
    want = torch.autograd.grad(outputs[0].sum(), leaves)
    leaves[frozen] = leaves[frozen].detach()
    logprobs = ops.chunked_token_logprobs(*leaves, labels, torch.tensor(1.0))[0]
    logprobs.sum().backward()
    assert leaves[frozen].grad is None
    torch.testing.assert_close(leaves[1 - frozen].grad, want[1 - frozen], rtol=0, atol=0)


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_student_or_head_leaves_the_other_soft_gradient(frozen: int) -> None:
    leaves = [draw(TOKENS, DIM), draw(WORDS, DIM)]
    teacher = [draw(TOKENS, 5).detach(), draw(WORDS, 5).detach()]
    want = torch.autograd.grad(reference.soft_cross_entropy(*leaves, *teacher)[0].sum(), leaves)
    leaves[frozen] = leaves[frozen].detach()
    ops.chunked_soft_cross_entropy(*leaves, *teacher)[0].sum().backward()
    assert leaves[frozen].grad is None
    torch.testing.assert_close(leaves[1 - frozen].grad, want[1 - frozen])


def test_large_logits_stay_finite() -> None:
    hidden, weight = draw(TOKENS, DIM).detach() * 1e3, draw(WORDS, DIM).detach()
    labels = torch.zeros(TOKENS, dtype=torch.int64)
    want = reference.token_logprobs(hidden, weight, labels, torch.tensor(1.0))
    got = ops.chunked_token_logprobs(hidden.float(), weight.float(), labels, torch.tensor(1.0))
    torch.testing.assert_close(got[0].double(), want[0], rtol=1e-5, atol=1e-2)
    assert got[1].isfinite().all()


def test_bf16_computes_sums_in_fp32() -> None:
    hidden, weight = (draw(n, DIM).detach().bfloat16().requires_grad_() for n in (TOKENS, WORDS))
    labels = labels_with_dead_rows()
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    want = reference.token_logprobs(wide[0], wide[1], labels, torch.tensor(1.0))
    logprobs, entropy, lse = ops.chunked_token_logprobs(hidden, weight, labels, torch.tensor(1.0))
    assert logprobs.dtype == entropy.dtype == lse.dtype == torch.float32
    torch.testing.assert_close((logprobs.double(), entropy.double()), want, rtol=2e-2, atol=2e-2)
    weights = [torch.randn(TOKENS, dtype=torch.float64) for _ in range(2)]
    got = grads_of((logprobs, entropy), [w.float() for w in weights], [hidden, weight])
    expected = grads_of(want, weights, wide)
    for part, whole in zip(got, expected, strict=True):
        assert part.dtype == torch.bfloat16
        assert (part.double() - whole).abs().max() <= 2e-2 * whole.abs().max()


def test_no_tokens_give_empty_results_and_zero_gradients() -> None:
    hidden, weight = draw(0, DIM), draw(WORDS, DIM)
    labels = torch.zeros(0, dtype=torch.int64)
    logprobs, entropy, _ = ops.chunked_token_logprobs(hidden, weight, labels, torch.tensor(1.0))
    (logprobs.sum() + entropy.sum()).backward()
    assert weight.grad is not None
    assert (weight.grad == 0).all()
    loss = ops.chunked_soft_cross_entropy(hidden, weight, hidden, weight)[0]
    assert loss.shape == (0,)


class _Largest(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.numel())
        return result


def test_logits_of_all_tokens_and_words_never_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logit_chunks, "CHUNK_ELEMENTS", 1 << 12)
    monkeypatch.setattr(logit_chunks, "CHUNK_TOKENS", 64)
    hidden, weight = draw(256, DIM), draw(200, DIM)
    labels = torch.zeros(256, dtype=torch.int64)
    with _Largest() as seen:
        rows = ops.chunked_token_logprobs(hidden, weight, labels, torch.tensor(1.0))
        (rows[0] + rows[1]).sum().backward()
        loss = ops.chunked_soft_cross_entropy(hidden, weight, hidden.detach(), weight.detach())[0]
        loss.sum().backward()
    assert seen.elements <= 2 << 12
    assert math.prod((256, 200)) > 2 << 12
