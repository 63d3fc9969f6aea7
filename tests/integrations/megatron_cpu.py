"""Tiny Megatron-core models in gloo processes, and a step of theirs under Megatron's own schedule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from examples.megatron_core.on_cpu import CudaToCpu, core, shim

LAYERS, HIDDEN, VOCAB, LENGTH = 4, 16, 48, 12


def start(pp: int = 1, tp: int = 1, chunks: int = 1, cp: int = 1) -> None:
    """Initialise torch.distributed and Megatron's groups in this process."""
    shim()
    dist.init_process_group("gloo")
    core("parallel_state").initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        context_parallel_size=cp,
    )
    core("tensor_parallel.random").model_parallel_cuda_manual_seed(1)


def build(
    pp: int = 1,
    tp: int = 1,
    chunks: int = 1,
    *,
    tied: bool = False,
    sequence_parallel: bool = False,
    recompute: bool = False,
    cp: int = 1,
    attention: bool = True,
) -> list[Any]:
    """Chunks of a tiny GPTModel whose weights are functions of their global names alone."""
    extra = (
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        if recompute
        else {}
    )
    config = core("transformer.transformer_config").TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        ffn_hidden_size=24,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        batch_p2p_comm=False,  # one batch confuses the two directions between two ranks on gloo
        params_dtype=torch.float32,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=cp,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        sequence_parallel=sequence_parallel,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        normalization="RMSNorm",
        layernorm_zero_centered_gamma=False,
        **extra,
    )
    spec = core("models.gpt.gpt_layer_specs").get_gpt_layer_local_spec(normalization="RMSNorm")
    if not attention:
        identity = core("transformer.identity_op")
        spec.submodules.self_attention = identity.IdentityOp
        spec.submodules.self_attn_bda = identity.IdentityFuncOp
    state = core("parallel_state")
    models = []
    for chunk in range(chunks):
        where: dict[str, Any] = {} if chunks == 1 else {"vp_stage": chunk}
        model = core("models.gpt").GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=VOCAB,
            max_sequence_length=64,
            pre_process=state.is_pipeline_first_stage(ignore_virtual=False, **where),
            post_process=state.is_pipeline_last_stage(ignore_virtual=False, **where),
            position_embedding_type="rope",
            share_embeddings_and_output_weights=tied,
            **where,
        )
        models.append(fill(model, tp))
    return models


def fill(model: Any, tp: int) -> Any:
    """Draw each parameter from its global name; tensor-parallel ones are cut from the whole."""
    rank = core("parallel_state").get_tensor_model_parallel_rank()
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(sum(map(ord, global_name(model, name))) * 7919)
        cut = tp > 1 and getattr(parameter, "tensor_model_parallel", False)
        shape = list(parameter.shape)
        dim = int(parameter.partition_dim) if cut else 0
        shape[dim] *= tp if cut else 1
        whole = torch.empty(shape).normal_(0.0, 0.3, generator=generator)
        with torch.no_grad():
            parameter.copy_(whole.chunk(tp, dim)[rank] if cut else whole)
            if "norm" in name:
                parameter.mul_(0.3).add_(1.0)
    return model


def global_name(model: Any, name: str) -> str:
    """A parameter's name with its layer's global number; a tied head is the embedding."""
    parts = name.split(".")
    if "layers" in parts:
        at = parts.index("layers") + 1
        parts[at] = str(model.decoder.layers[int(parts[at])].layer_number)
    name = ".".join(parts)
    tied = model.share_embeddings_and_output_weights and name.startswith("output_layer")
    return "embedding.word_embeddings.weight" if tied else name


def train(models: list[Any], tokens: list[Tensor], *, forward_only: bool = False) -> list[float]:
    """Run Megatron's own schedule over micro-batches [B, S]; the losses of the last stage."""
    schedule = core("pipeline_parallel.schedules").get_forward_backward_func()

    def forward_step(data: Iterator[Tensor], model: Any, *unused: Any) -> tuple[Tensor, Any]:
        ids = next(data)
        rows, length = ids.shape
        positions = torch.arange(length).expand(rows, length)
        batch = {"ids": ids, "labels": ids.roll(-1, 1), "positions": positions}
        group = core("parallel_state").get_context_parallel_group()
        batch = core("utils").get_batch_on_this_cp_rank(batch, False, cp_group=group)
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
        output = model(batch["ids"], batch["positions"], mask, labels=batch["labels"])
        return output, lambda x: (x.mean(), {"loss": x.detach().mean().clone()})

    iterators = [iter(tokens) for _ in models]
    with CudaToCpu():
        outputs = schedule(
            forward_step_func=forward_step,
            data_iterator=iterators if len(models) > 1 else iterators[0],
            model=models if len(models) > 1 else models[0],
            num_microbatches=len(tokens),
            seq_length=tokens[0].shape[1],
            micro_batch_size=tokens[0].shape[0],
            forward_only=forward_only,
        )
    return [float(output["loss"]) for output in outputs]


def gradients(models: list[nn.Module]) -> dict[str, Tensor]:
    """Copies of all gradients by global name."""
    return {
        global_name(model, name): parameter.grad.clone()
        for model in models
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
