"""P-EAGLE: EAGLE-3 that predicts several tokens in one pass, with mask tokens for what is not known.

Source: P-EAGLE (arXiv 2602.01469) and the public checkpoint format. Legend: T rows, D hidden size,
H heads, K depths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from spec_compile.contract import DraftInputs, DraftOutput
from spec_compile.ir.ops import branch_attention, shift

from .blocks import Blocks, slot_stats
from .config import DraftConfig, check_draft_vocab, check_taps, eagle_taps, public_eagle_taps
from .decoder import DecoderLayer
from .eagle3 import Eagle3Layer
from .layers import RMSNorm
from .objective import check_loss, distance
from .own_head import OwnHead

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class PEagleConfig(DraftConfig):
    """What a `PEagle` is made of."""

    taps: tuple[int, ...]
    """Features, "after i layers" (0 is the embeddings), in the order in which ``fc`` reads them."""
    mask_token_id: int
    """Token that stands for those that are not known yet."""
    num_hidden_layers: int = 4
    num_depths: int = 8
    norm_before_residual: bool = False
    """The residual into the first attention is the normed hidden state."""
    draft_vocab_size: int | None = None
    """Tokens that the draft can propose; None means all of the target's."""
    loss: str = "ce"
    """As `Eagle3Config.loss`, and so the next three."""
    lk_scale: float = 1.0
    lk_decay: float = 1.0
    skip_unknown: bool = True
    anchors_per_document: int | None = None
    """None keeps every depth at every row; a number keeps the depths behind the first at so many rows."""

    family: ClassVar[str] = "PEagle"
    counted: ClassVar[tuple[str, ...]] = ("num_depths",)

    def __post_init__(self) -> None:
        object.__setattr__(self, "taps", check_taps(self, self.taps))
        if self.draft_vocab_size is None:
            object.__setattr__(self, "draft_vocab_size", self.vocab_size)
        super().__post_init__()
        check_draft_vocab(self)
        check_loss(self)
        if self.anchors_per_document is not None and self.anchors_per_document < 1:
            raise self.error(
                f"anchors_per_document must be at least 1, or None, found {self.anchors_per_document}"
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise self.error(
                f"mask_token_id={self.mask_token_id} is outside 0..{self.vocab_size - 1}"
            )

    @classmethod
    def defaults_for(
        cls, target_layers: int, vocab_size: int, overrides: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Features as EAGLE-3's; the last id of the vocabulary, usually unused, as the mask."""
        return {"taps": eagle_taps(target_layers), "mask_token_id": vocab_size - 1}

    @classmethod
    def public_fields(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Read the names that engines look the mask token and the features up by."""
        fields = public_eagle_taps(raw)
        for name in ("pard_token", "ptd_token_id"):
            if raw.get("mask_token_id") is None and raw.get(name) is not None:
                fields["mask_token_id"] = raw[name]
        fields["qk_norm"] = raw.get("qk_norm", raw.get("model_type") == "qwen3")
        return fields

    def to_dict(self, dtype: torch.dtype) -> dict[str, Any]:
        """Write the raw public form."""
        values = super().to_dict(dtype)
        taps = list(values.pop("taps"))
        # a name without "Eagle3" is not found by engines, which serve this as an EAGLE-3 that drafts in parallel
        kind = "Eagle3Qwen3ForCausalLM" if self.qk_norm else "LlamaForCausalLMEagle3"
        return {
            "architectures": [kind],
            **values,
            "pard_token": self.mask_token_id,
            "parallel_drafting": True,
            "eagle_aux_hidden_state_layer_ids": taps,
            "num_aux_hidden_states": len(taps),
        }


class PEagle(OwnHead):
    """The P-EAGLE draft: ``num_depths`` depths at every row, or fewer, all in one pass.

    Depth 0 is EAGLE-3's first step. Depth ``k`` of row ``t`` knows neither the token nor the feature:
    it reads the mask's, at position ``t+k``, sees the depth-0 rows up to ``t`` and its own row's
    depths 1..k, and predicts token ``t+2+k`` against the target's law of it.
    """

    config_class = PEagleConfig
    served_as = "parallel"

    def build(self, config: PEagleConfig) -> None:
        """Make the parts."""
        dim, width = config.hidden_size, len(config.taps) * config.target_hidden_size
        self.fc = nn.Linear(width, dim, bias=False)
        self.mask_hidden = nn.Parameter(torch.empty(1, 1, width))
        plain = [DecoderLayer(config) for _ in range(config.num_hidden_layers - 1)]
        self.layers = nn.ModuleList([Eagle3Layer(config), *plain])
        self.norm = RMSNorm(dim, config.rms_norm_eps)
        self.build_head(config)
        self.taps = config.taps
        if config.anchors_per_document is not None:
            self.block_size = config.num_depths
            self.anchors_per_document = config.anchors_per_document

    @property
    def num_draft_tokens(self) -> int:
        """Depths of one pass."""
        depths: int = self.config.num_depths
        return depths

    @classmethod
    def from_target(
        cls,
        target: nn.Module,
        num_depths: int = 4,
        *,
        seed: int = 0,
        dtype: torch.dtype | None = None,
        **overrides: Any,
    ) -> Self:
        """Make a new draft for a target: its sizes, its RoPE, and a copy of its output head.

        Args:
            target: a transformers causal LM of 2 or more layers; a meta one gives a meta draft.
            num_depths: tokens K that one pass predicts.
            seed: of the weights that are not copied.
            dtype: None means that of the target's head.
            overrides: any field of `PEagleConfig`; ``draft_vocab`` as for `Eagle3`.
        """
        return cls._from_target(target, seed, dtype, num_depths=num_depths, **overrides)

    def forward(self, inputs: DraftInputs) -> DraftOutput:
        """Run all depths; one sum over all of them, divided by the number of supervised elements."""
        dtype, depths = self.fc.weight.dtype, range(self.config.num_depths)
        frames = [_every_row(inputs)] + [self._later(inputs) for _ in depths[1:]]
        first = inputs.embedding(shift(inputs.tokens, 1, inputs.document)).to(dtype)
        mask = inputs.embedding(inputs.tokens.new_full((1,), self.config.mask_token_id)).to(dtype)
        unknown = self.fuse(self.mask_hidden[0])
        embedded = [first] + [mask.expand(f.size, -1) for f in frames[1:]]
        states = [self.fuse(inputs.features)]
        states += [unknown.expand(f.size, -1) for f in frames[1:]]

        first_layer, *layers = list[Any](self.layers)
        parts = [
            first_layer.project(embedded[k], states[k], frames[k].positions + k) for k in depths
        ]
        states = _mix(first_layer, parts, frames, inputs.document)
        for layer in layers:
            parts = [
                (*layer.project(states[k], frames[k].positions + k), states[k]) for k in depths
            ]
            states = _mix(layer, parts, frames, inputs.document)

        losses, counts, overlaps = [], [], []
        for depth, state in enumerate(states):
            teacher, valid = self._target(inputs, depth)
            loss, overlap = distance(
                self.config, self.norm(state), self.lm_head.weight, teacher, inputs.teacher, valid,
                self.columns(),
            )  # fmt: skip
            losses.append(loss)
            counts.append(valid.sum())
            overlaps.append(overlap)
        stats = {"acceptance": torch.stack(overlaps).sum(), **slot_stats(overlaps, counts)}
        return DraftOutput(torch.stack(losses).sum(), torch.stack(counts).sum(), stats)

    def fuse(self, features: Tensor) -> Tensor:
        """Map the tapped residual streams, [T, m D_t], or ``mask_hidden``, to hidden states [T, D]."""
        hidden: Tensor = self.fc(features.to(self.fc.weight.dtype))
        return hidden

    def run(self, hidden: Tensor, embedded: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Serve rows of known and of masked tokens in one causal pass.

        Args:
            hidden: [R, D], of `fuse`.
            embedded: [R, D_t], the target's embeddings of the tokens read.
            positions: int64 [R].
            attend: (q, k, v), [R, H, head_dim] each, to [R, Hq, head_dim], called once a layer.

        Returns:
            What the head reads, [R, D].
        """
        first, *layers = list[Any](self.layers)
        *heads, residual = first.project(embedded.to(hidden.dtype), hidden, positions)
        hidden = first.finish(attend(*heads), residual)
        for layer in layers:
            hidden = layer.finish(attend(*layer.project(hidden, positions)), hidden)
        normed: Tensor = self.norm(hidden)
        return normed

    def logits(self, output: Tensor) -> Tensor:
        """Map what `run` gave, [R, D], to logits [R, V]."""
        return self.target_logits(output)

    def _later(self, inputs: DraftInputs) -> Frame:
        """Where depths behind the first are computed: at every row, or at the anchors alone."""
        if self.config.anchors_per_document is None:
            return _every_row(inputs)
        blocks = Blocks.of(inputs, 1)
        number = torch.arange(blocks.anchors.shape[0], device=blocks.anchors.device)
        return Frame(blocks.document, blocks.anchors + 1, number, blocks.positions[:, 0])

    def _target(self, inputs: DraftInputs, depth: int) -> tuple[Tensor, Tensor]:
        """What the teacher's head reads at each element of a depth, and whether it is supervised."""
        if depth == 0 or self.config.anchors_per_document is None:
            teacher = shift(inputs.teacher.hidden, depth + 1, inputs.document)
            return teacher, shift(inputs.loss_mask, depth + 2, inputs.document)
        blocks = Blocks.of(inputs, depth + 2)
        ahead = torch.arange(depth + 2, depth + 3, device=blocks.anchors.device)
        _, valid = blocks.targets(inputs, ahead)
        return inputs.teacher.hidden[blocks.rows[:, depth + 1]], valid[:, 0]


@dataclass(frozen=True)
class Frame:
    """The rows of one depth: which documents they see, up to where, and which rows are one chain."""

    document: Tensor
    limit: Tensor
    group: Tensor
    positions: Tensor

    @property
    def size(self) -> int:
        """Number of rows."""
        return self.document.shape[0]


def _every_row(inputs: DraftInputs) -> Frame:
    return Frame(inputs.document, inputs.index + 1, inputs.index, inputs.positions)


def _mix(
    layer: Any,
    parts: list[tuple[Tensor, Tensor, Tensor, Tensor]],
    frames: list[Frame],
    document: Tensor,
) -> list[Tensor]:
    """Attention and MLP of one layer at every depth, from its (q, k, v, residual)."""
    _, k_main, v_main, _ = parts[0]
    states = []
    for depth, ((q, _, _, residual), frame) in enumerate(zip(parts, frames, strict=True)):
        group = frame.group
        branches = [(k, v, group, group) for _, k, v, _ in parts[1 : depth + 1]]
        mixed = branch_attention(
            q, k_main, v_main, branches,
            q_limit=frame.limit, q_document=frame.document, k_document=document,
        )  # fmt: skip
        states.append(layer.finish(mixed, residual))
    return states
