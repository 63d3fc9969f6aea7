"""Make vLLM draw drafted tokens from the generators of requests that have a seed.

vLLM 0.32 and 0.33 draw them from the global generator, also for requests with a seed: the law of what comes out is
right, but the sample is another one each time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

GREEDY = 1e-5
"""Temperatures below are greedy, as in vLLM's sampler."""
Sample = Callable[..., tuple[Tensor, Tensor | None]]


def seeded(sample: Sample) -> Sample:
    """Wrap a proposer's ``_sample_from_logits``: rows of requests with a generator are drawn from it."""

    @wraps(sample)
    def drawn(self: Any, logits: Tensor, sampling_metadata: Any) -> tuple[Tensor, Tensor | None]:
        tokens, laws = sample(self, logits, sampling_metadata)
        temperature = sampling_metadata.temperature
        if laws is None or temperature is None:
            return tokens, laws
        each = laws.shape[0] // temperature.shape[0]
        for request, generator in sampling_metadata.generators.items():
            if float(temperature[request]) < GREEDY:
                continue
            rows = slice(request * each, (request + 1) * each)
            noise = torch.empty_like(laws[rows]).exponential_(generator=generator)
            tokens[rows] = (laws[rows] / noise).argmax(-1).to(tokens.dtype)
        return tokens, laws

    drawn.from_generators = True  # type: ignore[attr-defined]
    return drawn


def seed_drafts() -> None:
    """Wrap vLLM's proposer once; where there is none of that kind, say that seeds do not reach drafts."""
    from vllm.v1.spec_decode import llm_base_proposer

    proposer: Any = getattr(llm_base_proposer, "SpecDecodeBaseProposer", None)
    sample = getattr(proposer, "_sample_from_logits", None)
    if sample is None:
        log.warning(
            "vLLM: requests with a seed are not reproducible in this version when drafts are used"
        )
    elif not hasattr(sample, "from_generators"):
        proposer._sample_from_logits = seeded(sample)
