"""EAGLE-3 with training-time test: the draft unrolls its own recurrence while it trains.

Source: EAGLE-3 (Li et al. 2025) and its public training code; options of the 3.1 variant from the
public checkpoint format of speculators. Legend: T rows, D hidden size, H heads, K steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from spec_compile.contract import DraftInputs, DraftOutput
from spec_compile.ir.ops import branch_attention, shift

from .config import windows
from .decoder import SelfAttention
from .eagle3_config import Eagle3Config
from .layers import GatedMLP, RMSNorm
from .losses import chain_sums
from .own_head import OwnHead

Attend = Callable[..., Tensor]


class Eagle3Layer(nn.Module):
    """The one decoder layer; its attention reads the token's embedding beside the hidden state."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        dim, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = SelfAttention(config, 2 * dim)
        self.hidden_norm = RMSNorm(dim, eps)
        self.input_layernorm = RMSNorm(dim, eps)
        self.post_attention_layernorm = RMSNorm(dim, eps)
        self.mlp = GatedMLP(dim, config.intermediate_size, config.hidden_act)
        self.norm_before_residual = config.norm_before_residual

    def project(
        self, embedded: Tensor, hidden: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys and values of [norm(embedded); norm(hidden)], and the residual."""
        normed = self.hidden_norm(hidden)
        u = torch.cat((self.input_layernorm(embedded), normed), -1)
        residual = normed if self.norm_before_residual else hidden
        return *self.self_attn(u, positions), residual

    def finish(self, mixed: Tensor, residual: Tensor) -> Tensor:
        """Add attention's output [T, H, head_dim] and the MLP to the residual [T, D]."""
        hidden = residual + self.self_attn.o_proj(mixed.flatten(1))
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class Eagle3(OwnHead):
    """The EAGLE-3 draft: ``ttt_length`` steps over every row of the packed row.

    Row ``t`` at step ``k`` embeds token ``t+1+k``, attends from position ``t+k`` to the step-0 keys
    of rows ``<= t`` and to its own keys of steps 1..k, and predicts token ``t+2+k``; its teacher is
    the target's law of that token. It counts iff that token is valid and of the same document;
    `Eagle3Config` has switches for other conventions.
    """

    config_class = Eagle3Config

    def build(self, config: Eagle3Config) -> None:
        """Make the parts."""
        self.fc = nn.Linear(config.num_features, config.hidden_size, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.build_head(config)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(config.num_features, config.rms_norm_eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                RMSNorm(config.target_hidden_size, config.rms_norm_eps) for _ in config.taps
            )
        self.taps = config.taps
        self.ttt_length = config.ttt_length

    @property
    def num_draft_tokens(self) -> int:
        """Steps that training unrolls."""
        steps: int = self.ttt_length
        return steps

    @classmethod
    def from_target(
        cls,
        target: nn.Module,
        ttt_length: int = 4,
        *,
        seed: int = 0,
        dtype: torch.dtype | None = None,
        **overrides: Any,
    ) -> Self:
        """Make a new draft for a target: its sizes, its RoPE, and a copy of its output head.

        Args:
            target: a transformers causal LM of 2 or more layers; a meta one gives a meta draft.
            ttt_length: steps K that training unrolls.
            seed: of the weights that are not copied.
            dtype: None means that of the target's head.
            overrides: any field of `Eagle3Config`; ``draft_vocab``, int64 [V_d], the target's ids, ascending,
                that the draft can propose.

        Raises:
            ConfigError: the target has no output head, or sizes do not fit.
        """
        return cls._from_target(target, seed, dtype, ttt_length=ttt_length, **overrides)

    @classmethod
    def own_names(cls, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Take files with ``layers.0.`` for ``midlayer.`` too."""
        return {name.replace("layers.0.", "midlayer.", 1): t for name, t in tensors.items()}

    def forward(self, inputs: DraftInputs) -> DraftOutput:
        """Unroll K steps; sums are vectors [K], one entry a step."""
        document, index = inputs.document, inputs.index
        keys: list[tuple[Tensor, Tensor]] = []

        def attend(q: Tensor, k: Tensor, v: Tensor, *, window: int | None) -> Tensor:
            """Attend to step-0 keys of rows up to this one, and to its own of later steps."""
            keys.append((k, v))
            branches = [(*pair, index, index) for pair in keys[1:]]
            return branch_attention(
                q, *keys[0], branches,
                q_limit=index + 1, q_document=document, k_document=document, window=window,
            )  # fmt: skip

        hidden = self.fuse(inputs.features)
        sums: list[tuple[Tensor, Tensor, Tensor]] = []
        for step in range(self.ttt_length):
            embedded = inputs.embedding(shift(inputs.tokens, step + 1, document))
            hidden, output = self.step(hidden, embedded, inputs.positions + step, attend)
            head = self.lm_head.weight
            sums.append(chain_sums(self.config, inputs, step, output, head, self.columns()))
        losses, counts, overlaps = (torch.stack(column) for column in zip(*sums, strict=True))
        return DraftOutput(losses, counts, {"acceptance": overlaps})

    def fuse(self, features: Tensor) -> Tensor:
        """Map the tapped residual streams, [T, m D_t], to the first hidden state [T, D]."""
        features = features.to(self.fc.weight.dtype)
        if self.config.norm_before_fc:
            features = self.input_norm(features)
        if self.config.fc_norm:
            parts = features.split(self.config.target_hidden_size, -1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            features = torch.cat(normed, -1)
        hidden: Tensor = self.fc(features)
        return hidden

    def step(
        self, hidden: Tensor, embedded: Tensor, positions: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """Advance every row by one token: the same in training and in serving.

        Args:
            hidden: [T, D], from `fuse` or from the step before.
            embedded: [T, D_t], the target's embeddings of the tokens read.
            positions: int64 [T].
            attend: (q, k, v, window=), [T, H, head_dim] each, to [T, Hq, head_dim]; knows what each row sees.

        Returns:
            The next hidden state, and what the head reads, [T, D] both.
        """
        embedded = embedded.to(self.fc.weight.dtype)
        q, k, v, residual = self.midlayer.project(embedded, hidden, positions)
        mixed = attend(q, k, v, window=windows(self.config)[0])
        state = self.midlayer.finish(mixed, residual)
        normed: Tensor = self.norm(state)
        return (normed if self.config.norm_output else state), normed

    def logits(self, output: Tensor) -> Tensor:
        """Map what `step` gave for the head, [T, D], to logits [T, V]."""
        return self.target_logits(output)
