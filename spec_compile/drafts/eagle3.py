"""EAGLE-3 with training-time test: the draft unrolls its own recurrence while it trains.

Source: EAGLE-3 (Li et al. 2025) and its public training code; options of the 3.1 variant from the
public checkpoint format of speculators. Legend: T rows, D hidden size, H heads, K steps.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from spec_compile.contract import DraftInputs, DraftOutput
from spec_compile.errors import ConfigError
from spec_compile.ir.ops import branch_attention, shift, soft_cross_entropy

from . import checkpoint
from .eagle3_config import Eagle3Config
from .layers import GatedMLP, RMSNorm
from .rope import rotate

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Eagle3Attention(nn.Module):
    """Projections of the one attention; the mask is the draft's business."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        width, head_dim, bias = 2 * config.hidden_size, config.head_dim, config.attention_bias
        q_width, kv_width = (
            config.num_attention_heads * head_dim,
            config.num_key_value_heads * head_dim,
        )
        self.q_proj = nn.Linear(width, q_width, bias=bias)
        self.k_proj = nn.Linear(width, kv_width, bias=bias)
        self.v_proj = nn.Linear(width, kv_width, bias=bias)
        self.o_proj = nn.Linear(q_width, config.hidden_size, bias=bias)
        if config.qk_norm:
            self.q_norm = RMSNorm(head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(head_dim, config.rms_norm_eps)
        self.config = config

    def forward(self, u: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Make rotated queries and keys, and values, [T, H, head_dim] each, from ``u`` [T, 2 D]."""
        q, k, v = (
            project(u).unflatten(-1, (-1, self.config.head_dim))
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        theta, scaling = self.config.rope_theta, self.config.rope_scaling
        return rotate(q, positions, theta, scaling), rotate(k, positions, theta, scaling), v


class Eagle3Layer(nn.Module):
    """The one decoder layer; its attention reads the token's embedding beside the hidden state."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        dim, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Eagle3Attention(config)
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


class Eagle3(nn.Module):
    """The EAGLE-3 draft: ``ttt_length`` steps over every row of the packed row.

    Row ``t`` at step ``k`` embeds token ``t+1+k``, attends from position ``t+k`` to the step-0 keys
    of rows ``<= t`` and to its own keys of steps 1..k, and predicts token ``t+2+k``; its teacher is
    the target's law of that token. It counts iff that token is valid and of the same document.
    """

    def __init__(
        self,
        config: Eagle3Config,
        *,
        seed: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Build from sizes, with normal(0, initializer_range) weights drawn from ``seed`` alone."""
        super().__init__()
        device = torch.get_default_device() if device is None else torch.device(device)
        with torch.device("meta"):
            self.fc = nn.Linear(config.num_features, config.hidden_size, bias=False)
            self.midlayer = Eagle3Layer(config)
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            if config.norm_before_fc:
                self.input_norm = RMSNorm(config.num_features, config.rms_norm_eps)
            if config.fc_norm:
                self.fc_norm = nn.ModuleList(
                    RMSNorm(config.target_hidden_size, config.rms_norm_eps) for _ in config.taps
                )
        self.to(dtype=dtype or torch.get_default_dtype()).to_empty(device=device)
        self.config = config
        self.taps = config.taps
        self.ttt_length = config.ttt_length
        self.reset_parameters(seed)

    @torch.no_grad()
    def reset_parameters(self, seed: int) -> None:
        """Draw all weights anew, the same on every device; the global random state is untouched."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.is_meta:
                continue
            if parameter.ndim == 2:
                drawn = torch.empty(parameter.shape, device="cpu")
                parameter.copy_(
                    drawn.normal_(0.0, self.config.initializer_range, generator=generator)
                )
            else:
                parameter.zero_()
        for module in self.modules():
            if isinstance(module, RMSNorm) and not module.weight.is_meta:
                module.weight.fill_(1.0)

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
            overrides: any field of `Eagle3Config`.

        Raises:
            ConfigError: the target has no output head, or sizes do not fit.
        """
        head = getattr(target, "get_output_embeddings", lambda: None)()
        if head is None:
            raise ConfigError(
                f"{type(target).__name__} has no output head; give a causal LM, not its bare body"
            )
        weight: Tensor = head.weight
        config = Eagle3Config.from_target(
            target.config, vocab_size=weight.shape[0], ttt_length=ttt_length, **overrides
        )
        draft = cls(config, seed=seed, device=weight.device, dtype=dtype or weight.dtype)
        if not weight.is_meta:
            with torch.no_grad():
                draft.lm_head.weight.copy_(weight)
        return draft

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **overrides: Any,
    ) -> Self:
        """Read a checkpoint folder in the raw public form, ``midlayer.`` or ``layers.0.``.

        Args:
            path: a folder with ``config.json`` and safetensors weights.
            device: None means the default device.
            dtype: None means that of the file.
            overrides: fields of `Eagle3Config` that the file lacks or has wrong.

        Raises:
            ConfigError: a file, a tensor or a field is missing, unexpected or of the wrong size.
        """
        config = Eagle3Config.from_dict(checkpoint.read_config(path), **overrides)
        tensors = checkpoint.read_tensors(path)
        tensors = {name.replace("layers.0.", "midlayer.", 1): t for name, t in tensors.items()}
        tensors = config.without_vocabulary_maps(tensors)
        if dtype is None:
            dtype = next((t.dtype for t in tensors.values() if t.is_floating_point()), None)
        draft = cls(config, device=device, dtype=dtype)
        try:
            draft.load_state_dict(tensors)
        except RuntimeError as error:
            raise ConfigError(
                f"the weights in {path} do not fit its configuration: {error}"
            ) from error
        return draft

    def save(self, path: str | Path) -> None:
        """Write a checkpoint folder in the raw public form."""
        checkpoint.write(path, self.config.to_dict(self.fc.weight.dtype), self.state_dict())

    def forward(self, inputs: DraftInputs) -> DraftOutput:
        """Unroll K steps; sums are vectors [K], one entry a step."""
        document, index = inputs.document, inputs.index
        keys: list[tuple[Tensor, Tensor]] = []

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            """Attend to step-0 keys of rows up to this one, and to its own of later steps."""
            keys.append((k, v))
            branches = [(*pair, index, index) for pair in keys[1:]]
            return branch_attention(
                q, *keys[0], branches, q_limit=index + 1, q_document=document, k_document=document
            )

        hidden = self.fuse(inputs.features)
        losses, counts, overlaps = [], [], []
        for step in range(self.ttt_length):
            embedded = inputs.embedding(shift(inputs.tokens, step + 1, document))
            hidden, output = self.step(hidden, embedded, inputs.positions + step, attend)

            teacher = shift(inputs.teacher.hidden, step + 1, document)
            loss, overlap = soft_cross_entropy(
                output, self.lm_head.weight, teacher, inputs.teacher.weight
            )
            valid = shift(inputs.loss_mask, step + 2, document)
            losses.append(self.config.loss_decay**step * torch.where(valid, loss, 0.0).sum())
            counts.append(valid.sum())
            overlaps.append(torch.where(valid, overlap, 0.0).sum())
        stats = {"acceptance": torch.stack(overlaps)}
        return DraftOutput(torch.stack(losses), torch.stack(counts), stats)

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
            attend: (q, k, v), [T, H, head_dim] each, to [T, Hq, head_dim]; knows what each row sees.

        Returns:
            The next hidden state, and what the head reads, [T, D] both.
        """
        embedded = embedded.to(self.fc.weight.dtype)
        q, k, v, residual = self.midlayer.project(embedded, hidden, positions)
        state = self.midlayer.finish(attend(q, k, v), residual)
        normed: Tensor = self.norm(state)
        return (normed if self.config.norm_output else state), normed

    def logits(self, output: Tensor) -> Tensor:
        """Map what `step` gave for the head, [T, D], to logits [T, V]."""
        logits: Tensor = self.lm_head(output)
        return logits
