"""Multi-token prediction: one module, fed with its own output, predicts token after token.

Source: DeepSeek-V3 (2024), section 2.2, with one recursed module as in FastMTP; tensor names of
Qwen3-Next. The mask is that of serving, as in EAGLE-3's training-time test: a later step sees the
first step's keys and its own. Legend: T rows, D hidden size, H heads, K steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from spec_compile.contract import DraftInputs, DraftOutput
from spec_compile.ir.ops import branch_attention, label_losses, shift

from .base import Draft
from .config import DraftConfig
from .decoder import DecoderLayer
from .layers import RMSNorm

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class MTPConfig(DraftConfig):
    """What an `MTP` is made of."""

    num_steps: int = 3
    loss_decay: float = 0.6
    """Weight of step k's loss is ``loss_decay ** k``, over the sum of all."""

    family: ClassVar[str] = "MTP"
    counted: ClassVar[tuple[str, ...]] = ("num_steps",)

    @classmethod
    def public_fields(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Qwen3 heads are normed."""
        return {"qk_norm": raw.get("qk_norm", raw.get("model_type") == "qwen3")}

    def to_dict(self, dtype: torch.dtype) -> dict[str, Any]:
        """Write the raw public form."""
        return {
            "architectures": ["MTPDraftModel"],
            **super().to_dict(dtype),
            "num_mtp_layers": self.num_hidden_layers,
        }


class MTPModule(nn.Module):
    """``norm(layers(fc([norm(embedding); norm(hidden)])))``, in public names."""

    def __init__(self, config: MTPConfig) -> None:
        super().__init__()
        dim, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding = RMSNorm(dim, eps)
        self.pre_fc_norm_hidden = RMSNorm(dim, eps)
        self.fc = nn.Linear(2 * dim, dim, bias=False)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(dim, eps)

    def join(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Mix a token's embedding into the hidden state, [T, D] each."""
        parts = (self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden))
        joined: Tensor = self.fc(torch.cat(parts, -1))
        return joined


class MTP(Draft):
    """The MTP draft: ``num_steps`` steps over every row; head and embeddings are the target's.

    Row ``t`` at step ``k`` reads token ``t+1+k`` at position ``t+k`` and predicts token ``t+2+k``.
    What is handed on is the normed output, which the head reads too.
    """

    config_class = MTPConfig
    taps: tuple[int, ...] = ()
    reads_hidden = True

    def build(self, config: MTPConfig) -> None:
        """Make the parts."""
        self.mtp = MTPModule(config)

    @property
    def num_draft_tokens(self) -> int:
        """Steps that training unrolls."""
        steps: int = self.config.num_steps
        return steps

    @classmethod
    def from_target(
        cls,
        target: nn.Module,
        num_steps: int = 3,
        *,
        seed: int = 0,
        dtype: torch.dtype | None = None,
        **overrides: Any,
    ) -> Self:
        """Make a new draft for a target: its sizes and its RoPE.

        Args:
            target: a transformers causal LM of 2 or more layers; a meta one gives a meta draft.
            num_steps: steps K that training unrolls.
            seed: of the weights.
            dtype: None means that of the target's head.
            overrides: any field of `MTPConfig`.
        """
        return cls._from_target(target, seed, dtype, num_steps=num_steps, **overrides)

    def forward(self, inputs: DraftInputs) -> DraftOutput:
        """Unroll K steps; sums are vectors [K], one entry a step."""
        document, index = inputs.document, inputs.index
        seen: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self.mtp.layers]
        layers = itertools.cycle(seen)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            """Attend to step-0 keys of rows up to this one, and to its own of later steps."""
            keys = next(layers)
            keys.append((k, v))
            branches = [(*pair, index, index) for pair in keys[1:]]
            return branch_attention(
                q, *keys[0], branches, q_limit=index + 1, q_document=document, k_document=document
            )

        hidden = self.fuse(inputs.teacher.hidden)
        total = sum(self.config.loss_decay**step for step in range(self.config.num_steps))
        losses, counts, accepted = [], [], []
        for step in range(self.config.num_steps):
            embedded = inputs.embedding(shift(inputs.tokens, step + 1, document))
            hidden, _ = self.step(hidden, embedded, inputs.positions + step, attend)

            valid = shift(inputs.loss_mask, step + 2, document)
            labels = torch.where(valid, shift(inputs.tokens, step + 2, document), -1)
            teacher, head = shift(inputs.teacher.hidden, step + 1, document), inputs.teacher.weight
            loss, distance = label_losses(hidden, head.to(hidden.dtype), teacher, head, labels)
            losses.append(self.config.loss_decay**step / total * loss.sum())
            counts.append(valid.sum())
            accepted.append(torch.where(valid, 1 - distance.detach() / 2, 0.0).sum())
        stats = {"acceptance": torch.stack(accepted)}
        return DraftOutput(torch.stack(losses), torch.stack(counts), stats)

    def fuse(self, features: Tensor) -> Tensor:
        """Start from the target's hidden states after its final norm, [T, D_t]."""
        return features.to(self.mtp.fc.weight.dtype)

    def step(
        self, hidden: Tensor, embedded: Tensor, positions: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """Advance every row by one token: the same in training and in serving.

        Args:
            hidden: [T, D], from `fuse` or from the step before.
            embedded: [T, D_t], the target's embeddings of the tokens read.
            positions: int64 [T].
            attend: (q, k, v), [T, H, head_dim] each, to [T, Hq, head_dim], called once a layer.

        Returns:
            The next hidden state, which the target's head reads too, twice: [T, D].
        """
        hidden = self.mtp.join(embedded.to(hidden.dtype), hidden)
        for layer in list[Any](self.mtp.layers):
            hidden = layer.finish(attend(*layer.project(hidden, positions)), hidden)
        normed: Tensor = self.mtp.norm(hidden)
        return normed, normed
