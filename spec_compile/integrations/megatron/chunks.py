"""What the bridge reads of Megatron-core: sizes, layers and tables of model chunks, and the rank's place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlamaConfig

from spec_compile.errors import ChannelError, ConfigError, PlanError

from .rows import Sharding


@dataclass(frozen=True)
class Place:
    """Where this rank sits in Megatron's grid."""

    tp: int
    cp: int
    dp: int
    pp: int
    rank: tuple[int, int, int, int]
    """Indices along pp, dp, cp, tp."""
    num_chunks: int
    """Virtual pipeline stages of each rank."""

    @property
    def num_stages(self) -> int:
        """Pipeline stages over all ranks, virtual ones included."""
        return self.pp * self.num_chunks

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages of this rank, by chunk."""
        return tuple(chunk * self.pp + self.rank[0] for chunk in range(self.num_chunks))

    @property
    def is_last(self) -> bool:
        """Whether the last stage, and with it the draft, is here."""
        return self.rank[0] == self.pp - 1


def unwrap(model_chunks: nn.Module | Sequence[nn.Module]) -> list[Any]:
    """Take the models out of their wrappers (DDP, mixed precision).

    Raises:
        ConfigError: one is no GPTModel.
    """
    listed = [model_chunks] if isinstance(model_chunks, nn.Module) else list(model_chunks)
    models = []
    for chunk in listed:
        model: Any = chunk
        while not hasattr(model, "decoder") and isinstance(
            getattr(model, "module", None), nn.Module
        ):
            model = model.module
        if not hasattr(model, "decoder") or not hasattr(
            model, "share_embeddings_and_output_weights"
        ):
            raise ConfigError(
                f"expected Megatron-core's GPTModel, or a list with one a virtual stage, found {type(chunk).__name__}"
            )
        models.append(model)
    if not models:
        raise ConfigError("expected the model chunks of this rank, found none")
    return models


def place(models: Sequence[Any]) -> Place:
    """Read this rank's place from Megatron's parallel state.

    Raises:
        ConfigError: it is not initialised, or orders ranks otherwise than tp, cp, dp, pp (its default).
    """
    state = _parallel_state()
    if not state.model_parallel_is_initialized():
        raise ConfigError(
            "call megatron.core.parallel_state.initialize_model_parallel before attach"
        )
    sizes = {
        "tp": state.get_tensor_model_parallel_world_size(),
        "cp": state.get_context_parallel_world_size(),
        "dp": state.get_data_parallel_world_size(),
        "pp": state.get_pipeline_model_parallel_world_size(),
    }
    rank = (
        state.get_pipeline_model_parallel_rank(),
        state.get_data_parallel_rank(),
        state.get_context_parallel_rank(),
        state.get_tensor_model_parallel_rank(),
    )
    found = Place(**sizes, rank=rank, num_chunks=len(models))
    flat = ((rank[0] * found.dp + rank[1]) * found.cp + rank[2]) * found.tp + rank[3]
    if flat != dist.get_rank():
        raise ConfigError(
            f"rank {dist.get_rank()} has (pp, dp, cp, tp) = {rank} in a grid of {sizes}; expected Megatron's default "
            "order 'tp-cp-ep-dp-pp' over all ranks"
        )
    return found


def sharding_of(models: Sequence[Any], place: Place) -> Sharding:
    """How activations between layers are spread over the ranks of a stage."""
    return Sharding(place.cp, place.tp, bool(models[0].config.sequence_parallel and place.tp > 1))


def describe(model_chunks: nn.Module | Sequence[nn.Module]) -> LlamaConfig:
    """Give the model's sizes as a transformers configuration, from which drafts take theirs.

    For instance ``Eagle3Config.from_target(describe(model), vocab_size=V)``. The vocabulary is Megatron's padded one.
    """
    model = unwrap(model_chunks)[0]
    config = model.config
    return LlamaConfig(
        vocab_size=model.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.ffn_hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_query_groups,
        head_dim=config.kv_channels,
        rms_norm_eps=config.layernorm_epsilon,
        max_position_embeddings=model.max_sequence_length,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": float(getattr(model, "rotary_base", 10000)),
        },
    )


def layer_modules(model: Any) -> dict[int, nn.Module]:
    """Decoder layers of a chunk by their global number, from 1."""
    return {int(layer.layer_number): layer for layer in model.decoder.layers}


def embedding_shard(models: Sequence[Any]) -> Tensor | None:
    """This tp rank's rows of the input embedding; None where no chunk holds it."""
    for model in models:
        if model.pre_process:
            weight: Tensor = model.embedding.word_embeddings.weight
            return weight.detach()
        if model.share_embeddings_and_output_weights and model.post_process:
            return head_shard(model)
    return None


def head_shard(model: Any) -> Tensor:
    """This tp rank's rows of the output head, on the last stage.

    Raises:
        PlanError: the head has a bias, which a draft's teacher cannot have.
    """
    if getattr(model.output_layer, "bias", None) is not None:
        raise PlanError(
            "the output layer has a bias; the draft's teacher needs a plain linear head"
        )
    tied = model.share_embeddings_and_output_weights
    weight: Tensor = (
        model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
    )
    return weight.detach()


def whole_table(shard: Tensor, place: Place, vocab_size: int) -> Tensor:
    """Gather the rows of a table over the tensor-parallel group: [vocab_size, D], without padding rows.

    Raises:
        ChannelError: the group's collective failed.
    """
    if place.tp == 1:
        return shard[:vocab_size]
    group = _parallel_state().get_tensor_model_parallel_group()
    parts = [torch.empty_like(shard) for _ in range(place.tp)]
    try:
        dist.all_gather(parts, shard.contiguous(), group=group)
    except RuntimeError as error:
        raise ChannelError(
            f"could not gather a vocabulary table over tensor-parallel ranks: {error}"
        ) from error
    return torch.cat(parts)[:vocab_size]


def _parallel_state() -> Any:
    """Megatron's own registry of groups.

    Raises:
        ConfigError: Megatron-core is not installed.
    """
    try:
        from megatron.core import parallel_state
    except ImportError as error:
        raise ConfigError(
            "Megatron-core is not installed; install the extra 'megatron' (megatron-core 0.19)"
        ) from error
    return parallel_state
