"""One chunk of logits of a draft's law q beside its target's p: losses with a label, or over some of the words.

By generated kernels on a GPU, by plain tensor code elsewhere. Logits given to these functions are used up.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spec_compile.codegen.draft_law import (
    DraftLawShape,
    launch_draft_gradient,
    launch_draft_sweep,
)
from spec_compile.codegen.kernel import dtype_name

from .logit_chunks import add_at_label_, law_, pick_label, row_dot, wide
from .logit_kernels import is_generated


def label_losses(
    q_parts: Sequence[Tensor],
    p_logits: Tensor,
    labels: Tensor,
    columns: Tensor | None,
    renormalised: bool,
) -> Sequence[Tensor]:
    """Minus the label's log-probability under q, and sum of |q - p|; each [R].

    Args:
        q_parts: one or two [R, V_d], whose sum are q's logits.
        p_logits: [R, V].
        labels: int64 [R], columns of q; a negative one gives 0 for the first.
        columns: int64 [V_d], words of p; None: all, in order.
        renormalised: p is renormalised over the columns; else q is 0 for the other words.
    """
    if is_generated(p_logits.device):
        shape = _shape(q_parts, p_logits, columns, renormalised)
        logits = (*q_parts, p_logits)
        return launch_draft_sweep(shape, "draft_label_sweep", logits, columns, labels)
    q_logits = _sum(q_parts)
    picked = pick_label(q_logits, labels)
    q, q_lse = law_(q_logits)
    p, unseen = _over_columns(p_logits, columns, renormalised)
    ce = torch.where(labels >= 0, q_lse - picked, 0.0)
    return ce, q.sub_(p).abs_().sum(1) + unseen


def label_gradient(
    q_parts: Sequence[Tensor],
    p_logits: Tensor | None,
    labels: Tensor,
    columns: Tensor | None,
    renormalised: bool,
    d_ce: Tensor,
    d_distance: Tensor,
) -> Tensor:
    """Gradient of q's logits, in their dtype, from those of `label_losses`; no ``p_logits``: d_distance is 0."""
    if is_generated(q_parts[0].device):
        shape = _shape(q_parts, p_logits, columns, renormalised)
        logits = q_parts if p_logits is None else (*q_parts, p_logits)
        vectors = [labels, d_ce] if p_logits is None else [labels, d_ce, d_distance]
        launch_draft_gradient(shape, "draft_label_gradient", logits, columns, vectors)
        return q_parts[0]
    q, _ = law_(_sum(q_parts))
    grad = q * d_ce[:, None]
    add_at_label_(grad, labels, -d_ce)
    if p_logits is not None:
        p, _ = _over_columns(p_logits, columns, renormalised)
        side = torch.sign(q - p)
        lean = row_dot(side, q)
        grad += q.mul_(side.sub_(lean[:, None])).mul_(d_distance[:, None])
    return grad.to(q_parts[0].dtype)


def law_losses(q_logits: Tensor, p_logits: Tensor, columns: Tensor | None) -> Sequence[Tensor]:
    """Cross-entropy of q to p, sum of min(p, q), p's entropy, and whether its likeliest word is a column; each [R].

    p is renormalised over the columns in the first and the third.

    Args:
        q_logits: [R, V_d].
        p_logits: [R, V].
        columns: int64 [V_d], words of p; None: all, in order.
    """
    if is_generated(q_logits.device):
        shape = _shape([q_logits], p_logits, columns, renormalised=False)
        return launch_draft_sweep(shape, "draft_law_sweep", (q_logits, p_logits), columns, None)
    p, share, entropy, known = _renormalised(p_logits, columns)
    q_logits = wide(q_logits)
    # centred first: q_lse minus the mean logit would lose the digits that both share
    centred = q_logits.sub_(q_logits.amax(1)[:, None])
    mean = row_dot(p, centred)
    q, lse = law_(centred)
    overlap = torch.minimum(p.mul_(share[:, None]), q).sum(1)
    return lse - mean, overlap, entropy, known


def law_gradient(
    q_logits: Tensor, p_logits: Tensor, columns: Tensor | None, d_ce: Tensor, d_overlap: Tensor
) -> Tensor:
    """Gradient of q's logits, in their dtype, from those of the first two of `law_losses`."""
    if is_generated(q_logits.device):
        shape = _shape([q_logits], p_logits, columns, renormalised=False)
        logits, vectors = (q_logits, p_logits), (d_ce, d_overlap)
        launch_draft_gradient(shape, "draft_law_gradient", logits, columns, vectors)
        return q_logits
    p, share, _, _ = _renormalised(p_logits, columns)
    q, _ = law_(wide(q_logits))
    grad = (q - p).mul_(d_ce[:, None])
    # d overlap / d logit = q * (s - <s, q>), where s says that q is the smaller one
    side = torch.heaviside(p.mul_(share[:, None]) - q, p.new_tensor(0.5))
    lean = row_dot(side, q)
    grad += q.mul_(side.sub_(lean[:, None])).mul_(d_overlap[:, None])
    return grad.to(q_logits.dtype)


def _over_columns(
    logits: Tensor, columns: Tensor | None, renormalised: bool
) -> tuple[Tensor, Tensor | float]:
    """The target's law over the columns, and its share of all other words."""
    logits = wide(logits)
    if columns is None:
        return law_(logits)[0], 0.0
    if renormalised:
        return law_(logits[:, columns])[0], 0.0
    p = law_(logits)[0][:, columns]
    return p, 1 - p.sum(1)


def _renormalised(logits: Tensor, columns: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The target's law over the columns, their share of all, its entropy, and whether the top is among them."""
    logits = wide(logits)
    part = logits if columns is None else logits[:, columns]
    part_lse = part.logsumexp(1)
    known = (part.amax(1) >= logits.amax(1)).to(logits.dtype)
    share = (part_lse - logits.logsumexp(1)).exp()
    log_law = part - part_lse[:, None]
    p = log_law.exp()
    return p, share, -row_dot(p, log_law), known


def _sum(parts: Sequence[Tensor]) -> Tensor:
    total = wide(parts[0])
    for part in parts[1:]:
        total = total.add_(part)
    return total


def _shape(
    q_parts: Sequence[Tensor], p_logits: Tensor | None, columns: Tensor | None, renormalised: bool
) -> DraftLawShape:
    return DraftLawShape(
        q_dtype=dtype_name(q_parts[0].dtype),
        extra_dtype=dtype_name(q_parts[1].dtype) if len(q_parts) > 1 else "",
        p_dtype="" if p_logits is None else dtype_name(p_logits.dtype),
        has_columns=columns is not None,
        renormalised=renormalised and columns is not None,
    )
