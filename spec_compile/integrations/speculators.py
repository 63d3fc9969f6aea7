"""Draft modules of speculators in the draft contract: their own code runs, and their parameters are trained.

Only names are mapped: aligned rows go in, normed hidden states come out. Their attention is run in PyTorch's
spelling (``sdpa``) and recognised by its mask. The loss is computed here, chunked, by their conventions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_mask

from spec_compile.contract import DraftInputs, DraftOutput
from spec_compile.drafts import DSpark
from spec_compile.drafts.blocks import Blocks
from spec_compile.drafts.dflash_config import DFlashConfig, DSparkConfig
from spec_compile.drafts.draft_vocabulary import tokens_of
from spec_compile.drafts.dspark import MarkovHead
from spec_compile.drafts.losses import chain_output, chain_sums
from spec_compile.errors import ConfigError
from spec_compile.ir.ops import shift

from .block_drafts import ForeignDFlash, block_config
from .speculators_mtp import SpeculatorsMTP
from .speculators_peagle import SpeculatorsPEagle, windows_of


@dataclass(frozen=True)
class Rules:
    """Conventions of a chain's loss, as speculators has them; the names are those of `Eagle3Config`."""

    loss: str = "kl"
    lk_scale: float = 1.0
    lk_decay: float = 3.0
    skip_unknown: bool = False
    loss_decay: float = 1.0
    loss_mask_of: str = "embedded"
    loss_mean_over: str = "valid"


class SpeculatorsEagle3(nn.Module):
    """An ``Eagle3DraftModel`` that unrolls ``ttt_steps`` over the packed row."""

    def __init__(self, model: Any, ttt_steps: int = 3, rules: Rules | None = None) -> None:
        """Wrap a module whose parameters are trained in place.

        Args:
            model: its attention implementation is set to ``sdpa``.
            ttt_steps: steps that training unrolls.
            rules: of the loss.

        Raises:
            ConfigError: the draft's vocabulary is reduced, and has no map.
        """
        super().__init__()
        _check_map(model)
        self.model = _with_sdpa(model)
        self.taps = tuple(int(layer) for layer in model.target_layer_ids)
        self.ttt_steps, self.rules = ttt_steps, rules or Rules()

    def forward(self, inputs: DraftInputs) -> DraftOutput:
        """Unroll the steps; sums are vectors, one entry a step."""
        outputs: list[Tensor] = []
        recorder = self.model.norm.register_forward_hook(lambda _m, _a, out: outputs.append(out[0]))
        try:
            _plain_forward(self.model)(
                hidden_states=inputs.features.to(self.model.fc.weight.dtype)[None],
                input_ids=shift(inputs.tokens, 1, inputs.document)[None],
                document_ids=inputs.document[None],
                position_ids=inputs.positions[None],
                ttt_steps=self.ttt_steps,
            )
        finally:
            recorder.remove()
        head = self.model.lm_head.weight
        columns = tokens_of(self.model.d2t) if self.model.use_draft_vocab else None
        sums = [
            chain_sums(self.rules, inputs, k, output, head, columns)
            for k, output in enumerate(outputs)
        ]
        return chain_output(sums)


class SpeculatorsDFlash(ForeignDFlash):
    """A ``DFlashDraftModel``; its anchors come from the batch instead of being drawn in its forward."""

    @property
    def lm_head(self) -> Any:  # type: ignore[override]
        """Their head of a reduced vocabulary; a whole one has the target's live head in place of their copy."""
        return self.model.lm_head if self.model.use_draft_vocab else None

    @property
    def d2t(self) -> Tensor | None:
        """Their map; None for a whole vocabulary."""
        offsets: Tensor | None = self.model.d2t
        return offsets

    def layers_on(
        self, inputs: DraftInputs, blocks: Blocks, embedded: Tensor, positions: Tensor
    ) -> Tensor:
        """Run their layers under their masks."""
        model = self.model
        trunk = model.hidden_norm(model.fc(inputs.features.to(model.fc.weight.dtype)[None]))
        wave = model.rotary_emb(trunk, positions)
        windows = windows_of(model)
        masks = {window: self.mask(inputs, blocks, window) for window in windows}
        hidden = embedded
        for layer, window in zip(model.layers, windows, strict=True):
            hidden = layer(
                hidden_states=hidden,
                target_hidden=trunk,
                attention_mask=masks[window],
                position_ids=positions,
                use_cache=False,
                position_embeddings=wave,
            )
        normed: Tensor = model.norm(hidden)
        return normed

    def mask(self, inputs: DraftInputs, blocks: Blocks, window: int | None) -> Tensor:
        """Their mask of all slots and keys."""
        from speculators.models.dflash.attention import create_anchor_block_mask_mod

        rule, rows, keys = create_anchor_block_mask_mod(
            document_ids=inputs.document,
            total_seq_len=inputs.tokens.shape[0],
            anchor_positions=blocks.anchors.clamp_min(0),
            block_size=self.block_size,
            sliding_window=window,
            sliding_window_non_causal=self.model.sliding_window_non_causal,
        )
        return create_mask(rule, None, None, rows, keys, inputs.tokens.device)


class SpeculatorsDSpark(SpeculatorsDFlash, DSpark):
    """A ``DSparkDraftModel``: as its DFlash part, with its own heads for previous tokens and for confidence."""

    @property
    def markov_head(self) -> Any:  # type: ignore[override]
        """Their head, in our words."""
        return Markov(self.model.markov_head)

    @property
    def confidence_head(self) -> Any:  # type: ignore[override]
        """Their head; it has the same name and parameters."""
        return self.model.confidence_head


class Markov:
    """A ``MarkovHead`` of speculators as `drafts.dspark.MarkovHead`, without parameters of its own."""

    step, over_blocks = MarkovHead.step, MarkovHead.over_blocks

    def __init__(self, head: Any) -> None:
        """Take over the parts, which have the same names there."""
        self.kind = head.head_type
        self.markov_w1, self.markov_w2 = head.markov_w1, head.markov_w2
        self.gate_proj = getattr(head, "gate_proj", None)
        self.joint_proj = getattr(head, "joint_proj", None)


def from_speculators(model: Any, **options: Any) -> nn.Module:
    """Wrap a draft module of speculators; its parameters are trained in place.

    Args:
        model: an ``Eagle3DraftModel``, ``PEagleDraftModel``, ``MTPDraftModel``, ``DFlashDraftModel`` or
            ``DSparkDraftModel``.
        options: ``ttt_steps`` and ``rules`` of an EAGLE-3; arguments of `SpeculatorsPEagle` or `SpeculatorsMTP`;
            fields of `DFlashConfig` or `DSparkConfig` of block drafts.

    Raises:
        ConfigError: another module; or a reduced vocabulary without a map.
    """
    kind = type(model).__name__
    if kind == "Eagle3DraftModel":
        return SpeculatorsEagle3(model, **options)
    if kind == "PEagleDraftModel":
        _check_map(model)
        return SpeculatorsPEagle(_with_sdpa(model), **options)
    if kind == "MTPDraftModel":
        return SpeculatorsMTP(model, **options)
    if kind not in BLOCK_DRAFTS:
        raise ConfigError(
            "from_speculators takes an Eagle3DraftModel, a PEagleDraftModel, an MTPDraftModel, a DFlashDraftModel or a "
            f"DSparkDraftModel, found {kind}; load its checkpoint into a draft of this package instead"
        )
    _check_map(model)
    made, config_class, fields = BLOCK_DRAFTS[kind]
    known = {
        "taps": tuple(int(layer) for layer in model.target_layer_ids),
        "mask_token_id": model.mask_token_id,
        "block_size": model.block_size,
        "sample_from_anchor": model.config.sample_from_anchor,
        "draft_vocab_size": model.draft_vocab_size,
        "loss_mean_over": "valid",
        "skip_unknown": False,
        **fields(model),
    }
    layer = model.config.transformer_layer_config
    config = block_config(layer, kind=config_class, **{**known, **options})
    draft: nn.Module = made(_with_sdpa(model), config)
    return draft


def _dflash_fields(model: Any) -> dict[str, Any]:
    return {"loss_type": "kl"}


def _dspark_fields(model: Any) -> dict[str, Any]:
    """Their heads; of their losses, total variation with weight 1, as half of the L1 distance."""
    if model.markov_head is None:
        raise ConfigError("DSparkDraftModel has no Markov head: give it a markov_rank above 0")
    names = (
        "markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov",
    )  # fmt: skip
    return {name: getattr(model.config, name) for name in names} | {
        "ce_weight": 0.0,
        "l1_weight": 0.5,
        "teacher_law": "draft",
    }


BLOCK_DRAFTS: dict[str, tuple[Any, Any, Any]] = {
    "DFlashDraftModel": (SpeculatorsDFlash, DFlashConfig, _dflash_fields),
    "DSparkDraftModel": (SpeculatorsDSpark, DSparkConfig, _dspark_fields),
}


def _with_sdpa(model: Any) -> Any:
    """Let a module attend by ``scaled_dot_product_attention`` under dense boolean masks."""
    model.config.transformer_layer_config._attn_implementation = "sdpa"
    model._attn_impl, model._create_mask_fn = "sdpa", create_mask
    return model


def _plain_forward(model: Any) -> Any:
    """The module's forward without the compiler that it is wrapped in where there is a GPU."""
    forward = type(model).forward
    return getattr(forward, "_torchdynamo_orig_callable", forward).__get__(model)


def _check_map(model: Any) -> None:
    if model.use_draft_vocab and int(model.t2d.sum()) != model.draft_vocab_size:
        raise ConfigError(
            f"{type(model).__name__} has a draft vocabulary of {model.draft_vocab_size} without a map; call its "
            "load_vocab_mappings(t2d, d2t) first"
        )
