"""What is done to one chunk of logits: by generated kernels on a GPU, by plain tensor code elsewhere.

Between the products of a loss over the vocabulary lie only steps that take one logit at a time and sums
over rows. One after the other, each reads and writes the whole chunk in fp32. A generated kernel takes all
of them: it reads the logits as the products left them, where sums must come first several times, and
writes none, or their gradient. Logits given to these functions are used up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spec_compile.codegen.kernel import dtype_name
from spec_compile.codegen.label_law import (
    LabelLawShape,
    launch_label_gradient,
    launch_label_sweep,
)
from spec_compile.codegen.soft_law import SoftLawShape, launch_soft_gradient, launch_soft_sweep
from spec_compile.codegen.triton_mode import triton_mode

from .attention.interface import record_fallback
from .logit_chunks import add_at_label_, law_, pick_label, row_dot, wide


def is_generated(device: torch.device) -> bool:
    """Whether generated kernels serve logits on ``device``; another device than the CPU that has none is told once."""
    if triton_mode(device.type) is not None:
        return True
    if device.type != "cpu":
        record_fallback(
            f"losses on {device.type} run as plain tensor code: Triton is missing, or does not serve it"
        )
    return False


def label_sweep_(
    state: Tensor, logits: Tensor, labels: Tensor, heat: Tensor, first_word: int
) -> None:
    """Take logits [R, W] of the words from ``first_word`` on into running sums of logits / heat.

    Args:
        state: [4, R]: the maximum; the sum of exponentials and their first moment, relative to it; the
            label's logit. What it holds before the first word is ignored.
        logits: of consecutive words; chunks come in the order of the vocabulary.
        labels: int64 [R], of the whole vocabulary.
        heat: scalar tensor, like the state.
        first_word: number of the chunk's first word.
    """
    if is_generated(logits.device):
        shape = LabelLawShape(dtype=dtype_name(logits.dtype))
        launch_label_sweep(shape, logits, labels, heat, state, first_word)
        return
    logits = _scaled(logits, heat)
    picked = pick_label(logits, labels - first_word)
    top = logits.amax(1)
    if first_word:
        top = torch.maximum(state[0], top)
    centred = logits.sub_(top[:, None])
    weights = centred.exp()
    # the moment of logits - top: lse minus the mean logit would lose the digits that both
    # share, 1e-3 of an entropy when logits are large
    total, moment = weights.sum(1), row_dot(weights, centred)
    if first_word:
        before, old_total, old_moment, old_picked = state
        fall = before - top
        shrink = torch.exp(fall)
        total = old_total * shrink + total
        moment = (old_moment + old_total * fall) * shrink + moment
        picked = old_picked + picked
    torch.stack((top, total, moment, picked), out=state)


def label_gradient(
    logits: Tensor,
    labels: Tensor,
    heat: Tensor,
    lse: Tensor,
    d_logprob: Tensor,
    of_entropy: tuple[Tensor, Tensor] | None,
    first_word: int,
) -> Tensor:
    """Gradient of ``logits / heat``, in the dtype of the logits, from those of log-prob and entropy.

    Args:
        logits: [R, W], of the words from ``first_word`` on.
        labels: int64 [R], of the whole vocabulary.
        heat: scalar tensor.
        lse: [R], of logits / heat over the whole vocabulary.
        d_logprob: [R].
        of_entropy: entropy [R] and its gradient [R]; None: it has none.
        first_word: number of the chunk's first word.
    """
    if is_generated(logits.device):
        shape = LabelLawShape(dtype=dtype_name(logits.dtype), with_entropy=of_entropy is not None)
        rows = (lse, d_logprob, *(of_entropy or ()))
        launch_label_gradient(shape, logits, labels, heat, rows, first_word)
        return logits
    log_law = _scaled(logits, heat).sub_(lse[:, None])
    if of_entropy is None:
        grad = log_law.exp_().mul_(-d_logprob[:, None])
    else:
        # d entropy / d logit = -p * (log p + entropy)
        entropy, d_entropy = of_entropy
        factor = log_law + entropy[:, None]
        factor.mul_(d_entropy[:, None]).add_(d_logprob[:, None])
        grad = log_law.exp_().mul_(factor).neg_()
    add_at_label_(grad, labels - first_word, d_logprob)
    return grad.to(logits.dtype)


def soft_sweep(q_logits: Tensor, p_logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cross-entropy of q to p, sum of min(p, q), and both log-sum-exps, q's first; each [R].

    Args:
        q_logits: [R, V], of the student's law over all words.
        p_logits: [R, V], of the target's.
    """
    if is_generated(q_logits.device):
        return launch_soft_sweep(_soft_shape(q_logits, p_logits), q_logits, p_logits)
    q_logits, p_logits = wide(q_logits), wide(p_logits)
    p, p_lse = law_(p_logits)
    # centred first: q_lse minus the mean logit would lose the digits that both share
    top = q_logits.amax(1)
    mean = row_dot(p, q_logits.sub_(top[:, None]))
    q, centred_lse = law_(q_logits)
    overlap = torch.minimum(p, q, out=p).sum(1)
    return centred_lse - mean, overlap, centred_lse + top, p_lse


def soft_gradient(
    q_logits: Tensor, p_logits: Tensor, q_lse: Tensor, p_lse: Tensor, d_loss: Tensor
) -> Tensor:
    """Gradient of the student's logits [R, W], in their dtype: ``d_loss * (q - p)`` for any W of the words."""
    if is_generated(q_logits.device):
        shape = _soft_shape(q_logits, p_logits)
        launch_soft_gradient(shape, q_logits, p_logits, (q_lse, p_lse, d_loss))
        return q_logits
    q = torch.exp_(wide(q_logits).sub_(q_lse[:, None]))
    p = torch.exp_(wide(p_logits).sub_(p_lse[:, None]))
    return q.sub_(p).mul_(d_loss[:, None]).to(q_logits.dtype)


def _scaled(logits: Tensor, heat: Tensor) -> Tensor:
    return wide(logits).div_(heat)


def _soft_shape(q_logits: Tensor, p_logits: Tensor) -> SoftLawShape:
    return SoftLawShape(q_dtype=dtype_name(q_logits.dtype), p_dtype=dtype_name(p_logits.dtype))
