"""Losses over the vocabulary: the operators of a step beside their matrix products alone, and beside whole logits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, nll_loss

from spec_compile.runtime import label_losses, vocabulary  # noqa: F401  register the operators
from spec_compile.runtime.logit_kernels import is_generated

from .timing import Timing, measure

Losses = Callable[[], Tensor]
"""Gives the sum of a loss over all rows."""
Result = TypeVar("Result")


@dataclass(frozen=True)
class LossRow:
    """One loss over all rows, forward and backward in ms."""

    case: str
    tokens: int
    words: int
    hidden: int
    dtype: str
    kernel: str
    forward: Timing
    backward: Timing
    products: tuple[float, float] | None
    """The matrix products that chunks take, each once and over all rows and words, forward and backward; None where
    whole logits do not fit."""
    whole: tuple[Timing, Timing] | None
    """The same loss from logits [T, V] by PyTorch's own functions; None where they do not fit."""

    HEADER = (
        f"{'loss':20}{'hidden':>7}  {'kernel':11}{'forward ms':>26}{'products':>10}{'backward ms':>28}"
        f"{'products':>10}{'whole logits f ms':>28}{'whole logits b ms':>28}{'times':>8}"
    )

    def __str__(self) -> str:
        mine = self.forward.median + self.backward.median
        whole, ratio, shares = ["do not fit", ""], "-", ["-", "-"]
        if self.whole is not None:
            whole = [str(time) for time in self.whole]
            ratio = f"{sum(time.median for time in self.whole) / mine:.2f}x"
        if self.products is not None:
            pairs = zip(self.products, (self.forward, self.backward), strict=True)
            shares = [f"{alone / time.median:.0%}" for alone, time in pairs]
        return (
            f"{self.case:20}{self.hidden:7}  {self.kernel:11}{self.forward!s:>26}{shares[0]:>10}"
            f"{self.backward!s:>28}{shares[1]:>10}{whole[0]:>28}{whole[1]:>28}{ratio:>8}"
        )


def measure_losses(
    tokens: int, words: int, hidden_sizes: Sequence[int], dtype: torch.dtype, device: torch.device,
    repeats: int,
) -> Iterator[LossRow]:  # fmt: skip
    """Yield a row a loss and hidden size, all of ``tokens`` rows."""
    kernel = "generated" if is_generated(device) else "plain"
    for hidden in hidden_sizes:
        case = _Case(tokens, words, hidden, dtype, device)
        alone = _if_it_fits(functools.partial(case.products, repeats))
        for name, mine, whole, laws in (
            ("log-prob", case.logprob, case.whole_logprob, 1),
            ("log-prob + entropy", case.with_entropy, case.whole_with_entropy, 1),
            ("draft, soft", case.soft, case.whole_soft, 2),
            ("draft, label + L1", case.label, case.whole_label, 2),
        ):
            products = None
            if alone is not None:
                logits, d_rows, d_weight = alone
                products = (laws * logits, laws * logits + d_rows + d_weight)
            yield LossRow(
                name, tokens, words, hidden, str(dtype), kernel, *case.measure(mine, repeats),
                products, _if_it_fits(functools.partial(case.measure, whole, repeats)),
            )  # fmt: skip


def _if_it_fits(call: Callable[[], Result]) -> Result | None:
    """What ``call`` returns, or None if memory does not suffice."""
    try:
        return call()
    except torch.OutOfMemoryError:
        return None
    except RuntimeError as error:
        if "allocate memory" in str(error):  # the CPU's allocator has no class of its own
            return None
        raise


class _Case:
    """Hidden states of a student and its target, both heads, and labels."""

    def __init__(
        self, tokens: int, words: int, hidden: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        def draw(rows: int) -> Tensor:
            return torch.randn(rows, hidden, device=device).mul_(hidden**-0.25).to(dtype)

        self.device = device
        self.rows, self.head = (draw(n).requires_grad_() for n in (tokens, words))
        self.teacher, self.teacher_head = draw(tokens), draw(words)
        self.labels = torch.randint(0, words, (tokens,), device=device)
        self.temperature = torch.ones((), device=device)

    def measure(self, loss: Losses, repeats: int) -> tuple[Timing, Timing]:
        """Time a loss and its gradients."""
        forward = measure(loss, self.device, repeats)
        total = loss()
        leaves = (self.rows, self.head)
        backward = measure(
            lambda: torch.autograd.grad(total, leaves, retain_graph=True), self.device, repeats
        )
        return forward, backward

    def products(self, repeats: int) -> tuple[float, float, float]:
        """Median ms of the products that give logits, gradients of rows, and gradients of the head."""
        rows, head = self.rows.detach(), self.head.detach()
        logits = linear(rows, head)
        calls = (lambda: linear(rows, head), lambda: logits @ head, lambda: logits.t() @ rows)
        first, second, third = (measure(call, self.device, repeats).median for call in calls)
        return first, second, third

    def logprob(self) -> Tensor:
        """Minus the labels' log-probs."""
        return -self._token_laws()[0].sum()

    def with_entropy(self) -> Tensor:
        """The same with a bonus for entropy."""
        logprob, entropy = self._token_laws()
        return -(logprob + 0.01 * entropy).sum()

    def _token_laws(self) -> tuple[Tensor, Tensor]:
        found = torch.ops.spec_compile.chunked_token_logprobs(
            self.rows, self.head, self.labels, self.temperature
        )
        return found[0], found[1]

    def soft(self) -> Tensor:
        """The student's cross-entropy to the target's law."""
        loss: Tensor = torch.ops.spec_compile.chunked_soft_cross_entropy(
            self.rows, self.head, self.teacher, self.teacher_head, None
        )[0]
        return loss.sum()

    def label(self) -> Tensor:
        """The label's cross-entropy under the student's law, and its L1 distance to the target's."""
        ce, distance = torch.ops.spec_compile.chunked_label_losses(
            self.rows, self.head, self.teacher, self.teacher_head, self.labels, None, None
        )
        total: Tensor = (0.1 * ce + 0.9 * distance).sum()
        return total

    def whole_logprob(self) -> Tensor:
        """`logprob` from whole logits."""
        return cross_entropy(linear(self.rows, self.head).float(), self.labels, reduction="sum")

    def whole_with_entropy(self) -> Tensor:
        """`with_entropy` from whole logits."""
        log_law = linear(self.rows, self.head).float().log_softmax(1)
        entropy = -(log_law.exp() * log_law).sum(1)
        return -(log_law.gather(1, self.labels[:, None])[:, 0] + 0.01 * entropy).sum()

    def whole_soft(self) -> Tensor:
        """`soft` from whole logits."""
        law = linear(self.teacher, self.teacher_head).float().softmax(1)
        return cross_entropy(linear(self.rows, self.head).float(), law, reduction="sum")

    def whole_label(self) -> Tensor:
        """`label` from whole logits."""
        law = linear(self.teacher, self.teacher_head).float().softmax(1)
        log_law = linear(self.rows, self.head).float().log_softmax(1)
        distance = (log_law.exp() - law).abs().sum()
        return 0.1 * nll_loss(log_law, self.labels, reduction="sum") + 0.9 * distance
