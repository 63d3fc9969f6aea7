"""Generated kernels over logits under Triton's interpreter, run as `interpreted.py` is, against float64."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from torch import Tensor

from spec_compile.codegen.draft_law import DraftLawShape, draft_law_kernel
from spec_compile.codegen.label_law import (
    LabelLawShape,
    label_law_kernel,
    launch_label_gradient,
    launch_label_sweep,
)
from spec_compile.codegen.soft_law import (
    SoftLawShape,
    launch_soft_gradient,
    launch_soft_sweep,
    soft_law_kernel,
)
from spec_compile.ir import reference
from spec_compile.runtime import draft_laws, logit_chunks, logit_kernels
from spec_compile.runtime.kernels import REGISTERED

assert REGISTERED, "the operators are there"
ops = torch.ops.spec_compile
ROWS, WORDS, BLOCK = 5, 37, 16
TOLERANCES = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1e-2, "float64": 1e-12}


def draw(*shape: int, dtype: str = "float64", scale: float = 4.0) -> Tensor:
    return (scale * torch.randn(shape, dtype=torch.float64)).to(getattr(torch, dtype))


def worked(dtype: str) -> torch.dtype:
    return torch.float64 if dtype == "float64" else torch.float32


def test_this_process_interprets() -> None:
    assert logit_kernels.is_generated(torch.device("cpu"))


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("cuts", [(0, 37), (0, 16, 37), (0, 1, 30, 37)])
def test_a_sweep_and_its_gradient_equal_float64(cuts: tuple[int, ...], dtype: str) -> None:
    """Rows whose largest logit lies in the first, a middle and the last chunk, and one without a label."""
    logits, labels = draw(ROWS, WORDS, dtype=dtype), torch.tensor([0, 36, 17, -1, 5])
    logits[torch.arange(3), torch.tensor([0, 20, 36])] = 9.0
    heat = torch.tensor(0.7, dtype=worked(dtype))
    state = torch.full((4, ROWS), torch.nan, dtype=worked(dtype))
    shape = LabelLawShape(dtype=dtype, block=BLOCK)
    parts = [logits[:, a:b].contiguous() for a, b in itertools.pairwise(cuts)]
    for first, part in zip(cuts, parts, strict=False):
        launch_label_sweep(shape, part, labels, heat, state, first)
    wide = logits.double().requires_grad_()
    log_law = (wide / heat.double()).log_softmax(1)
    entropy = -(log_law.exp() * log_law).sum(1)
    logprob = torch.where(labels >= 0, log_law.gather(1, labels.clamp(0)[:, None])[:, 0], 0.0)
    top, total, moment, picked = state.double()
    lse = top + total.log()
    exact = 1e-12 if dtype == "float64" else 3e-6
    torch.testing.assert_close(total.log() - moment / total, entropy, rtol=exact, atol=exact)
    found = torch.where(labels >= 0, picked - lse, 0.0)
    torch.testing.assert_close(found, logprob, rtol=exact, atol=exact)
    of = [torch.where(labels >= 0, draw(ROWS), 0.0), draw(ROWS)]
    (want,) = torch.autograd.grad((logprob * of[0] + entropy * of[1]).sum(), wide)
    d_logprob, d_entropy = (x.to(heat.dtype) / heat for x in of)
    rows = (lse.to(heat.dtype), d_logprob, entropy.detach().to(heat.dtype), d_entropy)
    for first, part in zip(cuts, parts, strict=False):
        launch_label_gradient(shape, part, labels, heat, rows, first)
    tolerance = 5 * TOLERANCES[dtype]
    torch.testing.assert_close(torch.cat(parts, 1).double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("p_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("q_dtype", TOLERANCES)
def test_two_laws_and_their_gradient_equal_float64(q_dtype: str, p_dtype: str) -> None:
    q, p = draw(ROWS, WORDS, dtype=q_dtype), draw(ROWS, WORDS, dtype=p_dtype)
    shape = SoftLawShape(q_dtype=q_dtype, p_dtype=p_dtype, block=BLOCK)
    wide_q, wide_p = q.double().requires_grad_(), p.double()
    loss = -(wide_p.softmax(1) * wide_q.log_softmax(1)).sum(1)
    overlap = torch.minimum(wide_p.softmax(1), wide_q.softmax(1)).sum(1)
    want = (loss, overlap, wide_q.logsumexp(1), wide_p.logsumexp(1))
    got = launch_soft_sweep(shape, q, p)
    # the target's logits are read in its dtype, sums are the student's
    exact = 1e-12 if q_dtype == "float64" else 3e-6
    for found, expected in zip(got, want, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=exact, atol=exact)
    d_loss = draw(ROWS, dtype="float64").to(worked(q_dtype))
    (d_q,) = torch.autograd.grad((loss * d_loss.double()).sum(), wide_q)
    launch_soft_gradient(shape, q, p, (got[2], got[3], d_loss))
    tolerance = 5 * TOLERANCES[q_dtype]
    torch.testing.assert_close(q.double(), d_q, rtol=tolerance, atol=tolerance)


@pytest.fixture
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a row takes several blocks."""
    small = functools.partial(DraftLawShape, block=BLOCK)
    monkeypatch.setattr(draft_laws, "DraftLawShape", small)


COLUMNS = torch.randperm(WORDS, generator=torch.Generator().manual_seed(0))[:21]


@pytest.mark.usefixtures("_small_blocks")
@pytest.mark.parametrize("extra", [False, True])
@pytest.mark.parametrize("law", ["all words", "columns", "renormalised"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_label_losses_and_their_gradient_equal_float64(dtype: str, law: str, extra: bool) -> None:
    columns = None if law == "all words" else COLUMNS
    width = WORDS if columns is None else len(columns)
    parts = [draw(ROWS, width, dtype=dtype, scale=2.0) for _ in range(1 + extra)]
    p, labels = draw(ROWS, WORDS, dtype=dtype, scale=2.0), torch.tensor([0, width - 1, 17, -1, 5])
    q = sum(part.double() for part in parts)
    assert isinstance(q, Tensor)
    q.requires_grad_()
    p_law = p.double().softmax(1) if columns is None else p.double()[:, columns].softmax(1)
    unseen: Tensor | float = 0.0
    if law == "columns":
        p_law = p.double().softmax(1)[:, COLUMNS]
        unseen = 1 - p_law.sum(1)
    picked = q.log_softmax(1).gather(1, labels.clamp(0)[:, None])[:, 0]
    ce = torch.where(labels >= 0, -picked, 0.0)
    distance = (q.softmax(1) - p_law).abs().sum(1) + unseen
    of = [torch.where(labels >= 0, draw(ROWS), 0.0), draw(ROWS)]
    arguments = (labels, columns, law == "renormalised")
    exact, rough = (1e-11, 1e-11) if dtype == "float64" else (1e-5, 5 * TOLERANCES[dtype])
    for found, want in zip(
        draft_laws.label_losses(parts, p, *arguments), (ce, distance), strict=True
    ):
        torch.testing.assert_close(found.double(), want, rtol=exact, atol=exact)
    narrow = [x.to(worked(dtype)) for x in of]
    of_ce, of_both = (
        torch.autograd.grad((ce * of[0] + distance * d).sum(), q, retain_graph=True)[0]
        for d in (torch.zeros(ROWS), of[1])
    )
    copies = [part.clone() for part in parts]
    got = draft_laws.label_gradient(copies, None, *arguments, narrow[0], torch.zeros(ROWS))
    torch.testing.assert_close(got.double(), of_ce, rtol=rough, atol=rough)
    got = draft_laws.label_gradient(parts, p, *arguments, *narrow)
    torch.testing.assert_close(got.double(), of_both, rtol=rough, atol=rough)


@pytest.mark.usefixtures("_small_blocks")
@pytest.mark.parametrize("has_columns", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_law_losses_and_their_gradient_equal_float64(dtype: str, has_columns: bool) -> None:
    columns = COLUMNS if has_columns else torch.arange(WORDS)
    q = draw(ROWS, len(columns), dtype=dtype, scale=2.0)
    p = draw(ROWS, WORDS, dtype=dtype, scale=2.0)
    p[0, COLUMNS[3]] = p[1, (set(range(WORDS)) - set(COLUMNS.tolist())).pop()] = 9.0
    wide_q, part = q.double().requires_grad_(), p.double()[:, columns]
    law = part.softmax(1)
    overlap = torch.minimum(p.double().softmax(1)[:, columns], wide_q.softmax(1)).sum(1)
    ce, entropy = -(law * wide_q.log_softmax(1)).sum(1), -(law * law.log()).sum(1)
    known = (part.amax(1) == p.double().amax(1)).double()
    assert known[0] == 1
    assert known[1] == (not has_columns)
    given = columns if has_columns else None
    exact, rough = (1e-11, 1e-11) if dtype == "float64" else (1e-5, 5 * TOLERANCES[dtype])
    wanted = (ce, overlap, entropy, known)
    for found, want in zip(draft_laws.law_losses(q, p, given), wanted, strict=True):
        torch.testing.assert_close(found.double(), want, rtol=exact, atol=exact)
    of = [draw(ROWS) for _ in range(2)]
    (want,) = torch.autograd.grad((ce * of[0] + overlap * of[1]).sum(), wide_q)
    narrow = [x.to(worked(dtype)) for x in of]
    got = draft_laws.law_gradient(q, p, given, narrow[0], narrow[1])
    torch.testing.assert_close(got.double(), want, rtol=rough, atol=rough)


@pytest.mark.parametrize("columns", [None, COLUMNS], ids=["all words", "columns"])
@pytest.mark.parametrize("broken", ["student", "target"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_that_holds_no_number_shows_in_every_loss_of_its_own(
    broken: str, value: float, columns: Tensor | None
) -> None:
    """An overlap of 1 would read as a draft that is always right."""
    width = WORDS if columns is None else len(columns)
    at = 3 if columns is None or broken == "student" else int(columns[3])
    q, p = draw(3, width, dtype="float32"), draw(3, WORDS, dtype="float32")
    (q if broken == "student" else p)[1, at] = value
    labels = torch.tensor([0, 1, 2])
    soft = launch_soft_sweep(SoftLawShape(q_dtype="float32", p_dtype="float32"), q, q + 1)
    label = draft_laws.label_losses([q.clone()], p, labels, columns, False)
    ce, overlap, entropy, known = draft_laws.law_losses(q, p, columns)
    found = [label[1], ce, overlap]
    found += [label[0], *soft[:3]] if broken == "student" else [entropy]
    for vector in found:
        assert vector.isfinite().tolist() == [True, False, True]
    assert known[1] == 0 or broken == "student"


@pytest.mark.usefixtures("_small_blocks")
def test_columns_and_labels_may_lie_apart_and_labels_outside() -> None:
    apart = torch.arange(2 * WORDS).remainder(WORDS)[::2]
    columns, labels = apart[:20], torch.tensor([[0, 1], [19, 1], [20, 1], [-7, 1], [5, 1]])[:, 0]
    assert not columns.is_contiguous()
    assert not labels.is_contiguous()
    q, p = draw(ROWS, 20, dtype="float32"), draw(ROWS, WORDS, dtype="float32")
    log_law, law = q.log_softmax(1), p.softmax(1)[:, columns]
    ce, distance = draft_laws.label_losses([q.clone()], p.clone(), labels, columns, False)
    torch.testing.assert_close(ce[:2], -log_law[[0, 1], [0, 19]])
    torch.testing.assert_close(ce[2:4], torch.tensor([float(q[2].logsumexp(0)), 0.0]))
    torch.testing.assert_close(
        distance, (log_law.exp() - law).abs().sum(1) + 1 - law.sum(1), rtol=1e-5, atol=1e-5
    )
    overlap = draft_laws.law_losses(q, p, columns)[1]
    torch.testing.assert_close(overlap, torch.minimum(log_law.exp(), law).sum(1))


def test_large_logits_keep_the_digits_of_the_entropy() -> None:
    """All logits lie near 3e4: a moment of the logits themselves would have no digit of the entropy."""
    logits = draw(ROWS, WORDS, dtype="float32", scale=1.0) + 3e4
    state = torch.empty(4, ROWS)
    shape = LabelLawShape(dtype="float32", block=BLOCK)
    labels = torch.zeros(ROWS, dtype=torch.int64)
    launch_label_sweep(shape, logits, labels, torch.tensor(1.0), state, 0)
    law = logits.double().softmax(1)
    _, total, moment, _ = state
    torch.testing.assert_close(
        (total.log() - moment / total).double(), -(law * law.log()).sum(1), rtol=2e-6, atol=2e-6
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_over_the_vocabulary_and_their_gradients(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operators, in chunks of three rows and thirteen words, with gradients that autograd expands."""
    monkeypatch.setattr(logit_chunks, "CHUNK_ELEMENTS", 40)
    monkeypatch.setattr(logit_chunks, "CHUNK_TOKENS", 3)
    leaves = [draw(7, 8, scale=1).to(dtype), draw(WORDS, 8, scale=1).to(dtype)]
    teacher = [draw(7, 6, scale=1).to(dtype), draw(WORDS, 6, scale=1).to(dtype)]
    labels = torch.tensor([0, 36, -1, 12, 13, 25, 26])
    mine = [x.requires_grad_() for x in leaves]
    hidden, head = (x.detach().double().requires_grad_() for x in leaves)
    temperature = torch.tensor(0.9)

    def losses(op_values: tuple[Tensor, ...], soft_values: tuple[Tensor, ...]) -> Tensor:
        logprobs, entropy = op_values[:2]
        return logprobs.sum() + 0.5 * entropy.sum() + soft_values[0].sum()

    got = losses(
        ops.chunked_token_logprobs(*mine, labels, temperature),
        ops.chunked_soft_cross_entropy(*mine, *teacher, None),
    )
    want = losses(
        reference.token_logprobs(hidden, head, labels, temperature.double()),
        reference.soft_cross_entropy(hidden, head, *(x.double() for x in teacher)),
    )
    rough = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.double(), want, rtol=rough, atol=rough)
    grads = torch.autograd.grad(got, mine)
    for grad, expected in zip(grads, torch.autograd.grad(want, [hidden, head]), strict=True):
        error = (grad.double() - expected).norm() / expected.norm()
        assert error < rough, error


def test_a31_offsets_are_64_bit() -> None:
    kernels = [
        label_law_kernel(LabelLawShape(dtype="float32"), n)
        for n in ("label_sweep", "label_gradient")
    ]
    soft = SoftLawShape(q_dtype="float32", p_dtype="float32")
    kernels += [soft_law_kernel(soft, name) for name in ("soft_sweep", "soft_gradient")]
    draft = DraftLawShape(q_dtype="float32", p_dtype="float32", has_columns=True)
    for name in ("label_sweep", "label_gradient", "law_sweep", "law_gradient"):
        kernels.append(draft_law_kernel(draft, f"draft_{name}"))
    for kernel in kernels:
        assert "tl.program_id(0).to(tl.int64)" in kernel.path.read_text()
