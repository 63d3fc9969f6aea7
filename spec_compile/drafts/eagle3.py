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
from spec_compile.errors import ConfigError
from spec_compile.ir.ops import branch_attention, shift

from .config import windows
from .decoder import DecoderLayer, SelfAttention
from .eagle3_config import Eagle3Config
from .layers import GatedMLP, RMSNorm
from .losses import chain_output, chain_sums
from .own_head import OwnHead

Attend = Callable[..., Tensor]


class Eagle3Layer(nn.Module):
    """The first decoder layer; its attention reads the token's embedding beside the hidden state."""

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

    Layers behind the first are ordinary ones over its output. Each layer has keys of its own.

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
        later = {str(i): DecoderLayer(config) for i in range(1, config.num_hidden_layers)}
        self.layers = nn.ModuleDict(later)  # the name of layer i is layers.i
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
            ConfigError: the target is no causal LM, or sizes do not fit.
            PlanError: a feature of a layer that the target does not have.
        """
        return cls._from_target(target, seed, dtype, ttt_length=ttt_length, **overrides)

    @classmethod
    def own_names(cls, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Take files with ``layers.0.`` for ``midlayer.`` too."""
        return {name.replace("layers.0.", "midlayer.", 1): t for name, t in tensors.items()}

    def forward(self, inputs: DraftInputs) -> DraftOutput:
        """Unroll K steps; sums are vectors [K], one entry a step."""
        keys: list[list[tuple[Tensor, Tensor]]] = [[] for _ in windows(self.config)]
        hidden = self.fuse(inputs.features)
        sums: list[tuple[Tensor, Tensor, dict[str, Tensor]]] = []
        for step in range(self.ttt_length):
            embedded = inputs.embedding(shift(inputs.tokens, step + 1, inputs.document))
            attend = _over_steps(inputs, keys)
            hidden, output = self.step(hidden, embedded, inputs.positions + step, attend)
            head = self.lm_head.weight
            sums.append(chain_sums(self.config, inputs, step, output, head, self.columns()))
        return chain_output(sums)

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
            attend: (q, k, v, window=), [T, H, head_dim] each, to [T, Hq, head_dim], called once a layer; knows
                what each row sees.

        Returns:
            The next hidden state, and what the head reads, [T, D] both.
        """
        first, *others = windows(self.config)
        embedded = embedded.to(self.fc.weight.dtype)
        q, k, v, residual = self.midlayer.project(embedded, hidden, positions)
        state = self.midlayer.finish(attend(q, k, v, window=first), residual)
        for layer, window in zip(list[Any](self.layers.values()), others, strict=True):
            state = layer.finish(attend(*layer.project(state, positions), window=window), state)
        normed: Tensor = self.norm(state)
        output = normed if self.config.head_norm else state
        return (normed if self.config.norm_output else state), output

    def logits(self, output: Tensor) -> Tensor:
        """Map what `step` gave for the head, [T, D], to logits [T, V]."""
        return self.target_logits(output)

    def raw_config(self, dtype: torch.dtype) -> dict[str, Any]:
        """Write the raw public form, where it has one.

        Raises:
            ConfigError: the draft has several layers.
        """
        if self.layers:
            raise ConfigError(
                f"Eagle3 with {self.config.num_hidden_layers} layers has no raw form, whose one layer is midlayer; "
                "save it with form='speculators'"
            )
        values = super().raw_config(dtype)
        if not values["norm_output"]:
            del values["norm_output"]  # absent, all readers mean the same; false has two meanings
        return values


def _over_steps(inputs: DraftInputs, keys: list[list[tuple[Tensor, Tensor]]]) -> Attend:
    """Attention of one step, called once a layer; ``keys`` are those of each layer's steps so far."""
    index, document, turns = inputs.index, inputs.document, iter(keys)

    def attend(q: Tensor, k: Tensor, v: Tensor, *, window: int | None) -> Tensor:
        """Attend to step-0 keys of rows up to this one, and to its own of later steps."""
        own = next(turns)
        own.append((k, v))
        branches = [(*pair, index, index) for pair in own[1:]]
        return branch_attention(
            q, *own[0], branches,
            q_limit=index + 1, q_document=document, k_document=document, window=window,
        )  # fmt: skip

    return attend
