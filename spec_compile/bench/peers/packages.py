"""Which other packages can be measured here, and torch's own context parallelism where several GPUs are."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ..shards import Shape, random_rows
from ..work import Work, consumed

RING_FLASH = "ring_flash_attn"


def absent(device: torch.device, num_ranks: int, asked: Sequence[str]) -> list[str]:
    """Say in a line each which peers are not measured here, and why; FlexAttention where it is ``asked`` for."""
    lines = []
    several = device.type == "cuda" and 1 < num_ranks <= torch.cuda.device_count()
    if device.type != "cuda" and "flex" in asked:
        lines.append(f"FlexAttention: not measured on {device.type}, where it has no backward")
    if not several:
        lines.append(
            "torch context_parallel: not measured, it needs torchrun and a GPU of its own for every rank"
        )
    if importlib.util.find_spec(RING_FLASH) is None:
        lines.append("ring-flash-attn: not measured, the package is not importable here")
    elif not several:
        lines.append(
            "ring-flash-attn: not measured, it needs torchrun and a GPU of its own for every rank"
        )
    return [f"peer {line}" for line in lines]


def process_peers(
    shape: Shape, total: int, device: torch.device
) -> dict[str, type[TorchContextParallel | RingFlash]]:
    """Peers that all ranks of a launch can run together on one causal document, by name."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    if device.type != "cuda" or not 1 < size <= torch.cuda.device_count() or total % (2 * size):
        return {}
    peers: dict[str, type[TorchContextParallel | RingFlash]] = {
        "torch context_parallel": TorchContextParallel
    }
    if importlib.util.find_spec(RING_FLASH) is not None:
        peers["ring-flash-attn zigzag"] = RingFlash
    return peers


class TorchContextParallel(Work):
    """torch.distributed's experimental context parallelism of one causal document.

    Its kernels take as many key heads as query heads, so they are repeated outside the measured time's graph.
    """

    def __init__(self, shape: Shape, total: int, device: torch.device) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        self.device, size = device, dist.get_world_size()
        self._mesh = init_device_mesh(device.type, (size,))
        draw = torch.Generator(device=device).manual_seed(dist.get_rank())
        rows = total // size
        self._inputs = [
            random_rows(rows, shape.heads, shape, draw).transpose(0, 1)[None].contiguous()
            for _ in range(3)
        ]
        self._grad = torch.randn_like(self._inputs[0])

    def _parallel(self) -> contextlib.AbstractContextManager[Any]:
        from torch.distributed.tensor.experimental import context_parallel

        stack = contextlib.ExitStack()
        # it warns of being experimental, in every call
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        # no buffers: the inputs are shards already
        stack.enter_context(context_parallel(self._mesh))
        stack.enter_context(sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]))
        return stack

    def forward(self) -> list[Tensor]:
        """[1, heads, rows, dim]."""
        with self._parallel():
            q, k, v = (consumed(x) for x in self._inputs)
            return [scaled_dot_product_attention(q, k, v, is_causal=True)]

    def backward(self, outs: list[Tensor]) -> None:
        """Drop all gradients."""
        with self._parallel():
            torch.autograd.backward(outs, [self._grad])

    def sent_bytes(self) -> int:
        """Not counted."""
        return 0


class RingFlash(Work):
    """The zigzag ring of the package ring-flash-attn on one causal document."""

    def __init__(self, shape: Shape, total: int, device: torch.device) -> None:
        self.device = device
        self._attend: Any = importlib.import_module(RING_FLASH).zigzag_ring_flash_attn_func
        draw = torch.Generator(device=device).manual_seed(dist.get_rank())
        rows = total // dist.get_world_size()
        heads = (shape.heads, shape.key_heads, shape.key_heads)
        self._inputs = [random_rows(rows, number, shape, draw)[None] for number in heads]
        self._grad = torch.randn_like(self._inputs[0])

    def forward(self) -> list[Tensor]:
        """[1, rows, heads, dim]."""
        q, k, v = (consumed(x) for x in self._inputs)
        return [self._attend(q, k, v, causal=True)]

    def backward(self, outs: list[Tensor]) -> None:
        """Drop all gradients."""
        torch.autograd.backward(outs, [self._grad])

    def sent_bytes(self) -> int:
        """Not counted."""
        return 0
