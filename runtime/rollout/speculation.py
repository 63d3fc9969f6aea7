"""Accept or replace drafted tokens so that what comes out has exactly the target's law.

A drafted token d is kept with probability min(1, p(d) / q(d)); the first one that is not is replaced
by a draw from max(p - q, 0); after k kept ones a further token is drawn from p.
Source: Leviathan, Kalman and Matias, "Fast inference from transformers via speculative decoding"
(2023). Legend: B sequences, k drafted tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .randomness import Purpose, uniforms
from .sampling import RowParams, draw, log_law


@dataclass(frozen=True)
class Proposal:
    """What the draft proposes."""

    tokens: Tensor
    """int64 [B, k]."""
    log_laws: Tensor | None
    """[B, k, V]: the laws they were drawn from; None where every row is greedy."""
    lengths: Tensor | None = None
    """int64 [B]: how many of the k are proposals; it may depend on those alone. None: all."""

    @property
    def counts(self) -> Tensor:
        """int64 [B]: number of proposals."""
        if self.lengths is not None:
            return self.lengths
        rows, k = self.tokens.shape
        return torch.full((rows,), k, dtype=torch.int64, device=self.tokens.device)

    def cut(self, lengths: Tensor) -> Proposal | None:
        """Keep the first ``lengths``, int64 [B], of each sequence; None when nothing is left."""
        most = int(lengths.max())
        if not most:
            return None
        laws = None if self.log_laws is None else self.log_laws[:, :most]
        return Proposal(self.tokens[:, :most], laws, lengths)


@dataclass(frozen=True)
class Verdict:
    """What became of a proposal."""

    tokens: Tensor
    """int64 [B, k + 1]: the kept tokens, one of the target's own, then nothing of meaning."""
    kept: Tensor
    """int64 [B]: number of drafted tokens that were kept."""
    logprobs: Tensor
    """[B, k + 1], of `tokens` under the sampling law."""


def propose(
    logits: Tensor, params: RowParams, keys: Sequence[int], positions: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Draw the draft's next token of each sequence.

    Args:
        logits: [B, V], of the draft.
        params: of the B sequences.
        keys: of the B sequences.
        positions: int64 [B], of the tokens that are drawn.

    Returns:
        int64 [B], and the log-law [B, V] (None when all are greedy).
    """
    if params.all_greedy:
        return logits.argmax(-1), None
    law = log_law(logits, params)
    drawn = draw(law.exp(), uniforms(keys, positions[:, None], Purpose.PROPOSE)[:, 0])
    if params.any_greedy:
        drawn = torch.where(params.greedy, logits.argmax(-1), drawn)
    return drawn, law


def verify(
    logits: Tensor,
    proposal: Proposal | None,
    params: RowParams,
    keys: Sequence[int],
    positions: Tensor,
) -> Verdict:
    """Judge the drafted tokens and draw the target's own.

    Args:
        logits: [B, k + 1, V], of the target after the last token and after each drafted one.
        proposal: of k tokens; None for k = 0.
        params: of the B sequences.
        keys: of the B sequences.
        positions: int64 [B, k + 1], of the tokens that are decided.
    """
    rows, width, vocab = logits.shape
    law = log_law(logits.flatten(0, 1), params.repeated(width)).view(rows, width, vocab)
    best = logits.argmax(-1) if params.any_greedy else None
    if proposal is None:
        kept = torch.zeros(rows, dtype=torch.int64, device=logits.device)
        drafted = kept.new_zeros(rows, 0)
    else:
        drafted = proposal.tokens
        accepted = _accept(law, best, proposal, params, keys, positions)
        if proposal.lengths is not None:
            place = torch.arange(width - 1, device=logits.device)
            accepted = accepted & (place < proposal.lengths[:, None])
        kept = accepted.long().cumprod(-1).sum(-1)
    row = torch.arange(rows, device=logits.device)
    own = None if best is None else best[row, kept]
    if not params.all_greedy:
        weights = law[row, kept].exp()
        if proposal is not None:
            weights = _residual(weights, proposal, kept)
        uniform = uniforms(keys, positions.gather(1, kept[:, None]), Purpose.DRAW)[:, 0]
        drawn = draw(weights, uniform)
        own = drawn if own is None else torch.where(params.greedy, own, drawn)
    assert own is not None
    tokens = torch.cat((drafted, own[:, None]), 1).scatter(1, kept[:, None], own[:, None])
    return Verdict(tokens, kept, law.gather(-1, tokens[..., None])[..., 0])


def _accept(
    law: Tensor,
    best: Tensor | None,
    proposal: Proposal,
    params: RowParams,
    keys: Sequence[int],
    positions: Tensor,
) -> Tensor:
    """Decide on each drafted token by itself; bool [B, k]."""
    tokens = proposal.tokens
    if proposal.log_laws is None:
        assert best is not None
        return tokens == best[:, :-1]
    p = law[:, :-1].gather(-1, tokens[..., None])[..., 0].double().exp()
    q = proposal.log_laws.gather(-1, tokens[..., None])[..., 0].double().exp()
    accepted = uniforms(keys, positions[:, :-1], Purpose.ACCEPT) * q < p
    if best is None:
        return accepted
    return torch.where(params.greedy[:, None], tokens == best[:, :-1], accepted)


def _residual(p: Tensor, proposal: Proposal, kept: Tensor) -> Tensor:
    """Weights of the target's own token [B, V]: p where all was accepted, else max(p - q, 0)."""
    assert proposal.log_laws is not None
    k = proposal.tokens.shape[1]
    row = torch.arange(len(kept), device=kept.device)
    q = proposal.log_laws[row, kept.clamp_max(k - 1)].exp()
    left = (p - q).clamp_min(0.0)
    # where rounding leaves nothing, p and q are the same law
    use_p = (kept == proposal.counts) | (left.sum(-1) <= 0)
    return torch.where(use_p[:, None], p, left)
