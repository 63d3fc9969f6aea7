"""Train a Megatron-core GPT and an EAGLE-3 draft beside it, under Megatron's own pipeline schedule.

Run ``torchrun --nproc-per-node 2 -m examples.megatron_core --pp 2`` (or ``--tp 2``). Needs the ``megatron``
extra. Without a GPU, ``on_cpu`` maps the CUDA calls that Megatron-core makes unasked to the host.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

import spec_compile as sc
from examples.megatron_core.on_cpu import CudaToCpu, shim
from spec_compile.drafts.eagle3_config import Eagle3Config
from spec_compile.integrations import megatron

VOCABULARY, LENGTH, SEQUENCES, MICRO_BATCHES = 64, 32, 4, 4


def start(pp: int, tp: int) -> torch.device:
    """Initialise torch.distributed and Megatron's groups."""
    gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpu else "gloo")
    device = torch.device("cuda", dist.get_rank()) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    else:
        shim()
    parallel_state.initialize_model_parallel(tp, pp)
    model_parallel_cuda_manual_seed(1)
    torch.manual_seed(parallel_state.get_pipeline_model_parallel_rank())
    return device


def build(pp: int, tp: int, device: torch.device) -> Any:
    """This rank's part of a small GPT."""
    config = TransformerConfig(
        num_layers=4, hidden_size=64, num_attention_heads=4, ffn_hidden_size=128,
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp,
        params_dtype=torch.float32, pipeline_dtype=torch.float32, use_cpu_initialization=True,
        gradient_accumulation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False,
        hidden_dropout=0.0, attention_dropout=0.0, add_bias_linear=False, normalization="RMSNorm",
    )  # fmt: skip
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    ).to(device)


def sample(step: int, device: torch.device) -> list[Tensor]:
    """Micro-batches [B, S] of sequences that count in steps of 1, 2 or 3; the same on all ranks of a dp index."""
    dp = parallel_state.get_data_parallel_rank()
    generator = torch.Generator().manual_seed(1000 * dp + step)
    shape = (MICRO_BATCHES, SEQUENCES, 1)
    first = torch.randint(0, VOCABULARY, shape, generator=generator)
    stride = torch.randint(1, 4, shape, generator=generator)
    ids = (first + stride * torch.arange(LENGTH)) % VOCABULARY
    return list(ids.to(device))


def forward_step(data: Iterator[Tensor], model: Any) -> tuple[Tensor, Any]:
    """Megatron's side of the loop, with nothing of the draft in it."""
    ids = next(data)
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=ids.device).triu(1)[None, None]
    positions = torch.arange(LENGTH, device=ids.device).expand_as(ids)
    output = model(ids, positions, mask, labels=ids.roll(-1, 1))

    def loss(per_token: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        mean = per_token[:, :-1].mean()
        return mean, {"loss": mean.detach().clone()}

    return output, loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    device = start(options.pp, options.tp)
    model = build(options.pp, options.tp, device)

    config = Eagle3Config.from_target(
        megatron.describe(model), vocab_size=VOCABULARY, ttt_length=2, taps=(1, 2, 3)
    )
    draft = sc.drafts.Eagle3(config, seed=0, device=device)  # the same weights on every rank
    handle = megatron.attach(model, draft)  # leaves the model and its schedule as they are

    policy_optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    draft_optimizer = torch.optim.AdamW(handle.param_groups(lr=3e-3))
    for step in range(options.steps):
        micro_batches = sample(step, device)
        real = torch.ones(SEQUENCES, LENGTH, dtype=torch.bool, device=device)
        batches = [sc.PackedBatch.from_padded(ids, real, real) for ids in micro_batches]
        policy_optimizer.zero_grad()
        draft_optimizer.zero_grad()
        on_host = contextlib.nullcontext() if device.type == "cuda" else CudaToCpu()
        with on_host, handle.step(batches) as result:  # around Megatron's own call
            losses = get_forward_backward_func()(
                forward_step_func=forward_step, data_iterator=iter(micro_batches), model=model,
                num_microbatches=MICRO_BATCHES, seq_length=LENGTH, micro_batch_size=SEQUENCES,
                forward_only=False,
            )  # fmt: skip
        policy_optimizer.step()
        draft_optimizer.step()
        if losses and parallel_state.get_tensor_model_parallel_rank() == 0 and step % 5 == 4:
            policy_loss = sum(float(one["loss"]) for one in losses) / len(losses)
            shares = [v for k, v in result.metrics.items() if k.startswith("step/draft_acceptance")]
            accepted = ", ".join(f"{share:.2f}" for share in shares)
            print(
                f"step {step + 1}: policy loss {policy_loss:.3f}, draft loss {result.draft_loss:.3f}, "
                f"predicted acceptance {accepted}"
            )
    handle.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
