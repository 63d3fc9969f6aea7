"""Losses of a draft's law against its teacher's, as their papers name them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from spec_compile.contract import Teacher
from spec_compile.errors import ConfigError
from spec_compile.ir.ops import law_losses, soft_cross_entropy

LOSSES = ("ce", "kl", "tv", "lk", "lk_hybrid")
"""Soft cross-entropy; KL divergence; total variation; minus the log of the acceptance probability (Likelihood
of acceptance, LK); KL and total variation, mixed by that probability."""


def check_loss(config: Any) -> None:
    """Refuse a loss that is not known.

    Raises:
        ConfigError: names those that are.
    """
    if config.loss not in LOSSES:
        raise ConfigError(
            f"{config.family}: loss must be one of {', '.join(LOSSES)}, found {config.loss!r}"
        )


def distance(
    config: Any, output: Tensor, head: Tensor, hidden: Tensor, teacher: Teacher, valid: Tensor,
    columns: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Sum a draft's loss and its acceptance over the valid rows.

    Args:
        config: has ``loss``, ``lk_scale``, ``lk_decay`` and ``skip_unknown``.
        output: [R, D], what the head reads.
        head: [V_d, D].
        hidden: [R, D_t], what the teacher's head reads at each row.
        teacher: of the target.
        valid: bool [R].
        columns: int64 [V_d], ids of the draft's tokens; None: all of the target's.

    Returns:
        Two scalars; the second, sum of min(p, q), without gradient.
    """
    if columns is None and config.loss == "ce":
        ce, overlap = soft_cross_entropy(output, head, hidden, teacher.weight)
        return torch.where(valid, ce, 0.0).sum(), torch.where(valid, overlap, 0.0).sum()
    ce, overlap, entropy, known = law_losses(output, head, hidden, teacher.weight, columns, valid)
    losses = _losses(config, ce, torch.where(valid, overlap, 1.0), entropy)
    counted = valid & (known > 0) if config.skip_unknown and columns is not None else valid
    total: Tensor = torch.where(counted, losses[config.loss](), 0.0).sum()
    return total, overlap.detach().sum()


def _losses(config: Any, ce: Tensor, overlap: Tensor, entropy: Tensor) -> Mapping[str, Any]:
    def hybrid() -> Tensor:
        weight: Tensor = config.lk_scale * torch.exp(-config.lk_decay * overlap.detach())
        return weight * (ce - entropy) + (1 - weight) * (1 - overlap)

    return {
        "ce": lambda: ce,
        "kl": lambda: ce - entropy,
        "tv": lambda: 1 - overlap,
        "lk": lambda: -torch.log(overlap.clamp_min(torch.finfo(overlap.dtype).tiny)),
        "lk_hybrid": hybrid,
    }
