"""Megatron-core without a GPU: the few CUDA calls that it makes unasked, mapped to the host.

Schedules, layers and collectives that run are Megatron's own. Nothing here is needed on a GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


def core(name: str) -> Any:
    """A module of megatron.core."""
    return importlib.import_module(f"megatron.core.{name}")


class CudaToCpu(TorchFunctionMode):
    """The schedules make a few scalars with device="cuda", some in pinned memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return func(*args, **kwargs)


class NullStream:
    """A stream of a device that has none."""

    def wait_stream(self, other: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, *args: Any) -> None: ...

    def synchronize(self) -> None: ...


def shim() -> None:
    """Map Megatron's unconditional CUDA calls to the host; for processes of tests only."""
    cpu, stream = torch.device("cpu"), NullStream()
    torch.cuda.current_device = lambda: cpu  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda *a, **k: None
    torch.cuda.current_stream = lambda *a, **k: stream  # type: ignore[assignment]
    torch.cuda.manual_seed = torch.manual_seed  # type: ignore[assignment]
    Tensor.cuda = lambda self, *a, **k: self  # type: ignore[method-assign]
    torch.cuda.get_rng_state = lambda *a, **k: torch.get_rng_state()
    random = core("tensor_parallel.random")
    random._get_cuda_rng_state = lambda *a, **k: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *a, **k: torch.set_rng_state(state)

    @contextlib.contextmanager
    def fork(self: Any, name: str = "model-parallel-rng") -> Iterator[None]:
        before = torch.get_rng_state()
        torch.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(before)

    random.CudaRNGStatesTracker.fork = fork
    norm = core("transformer.torch_norm").WrappedTorchNorm
    make = norm.__new__

    def unguarded(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        # torch's norm is right on any rows; only the sum of its weight's gradient is left to the caller
        return make(cls, dataclasses.replace(config, sequence_parallel=False), *args, **kwargs)

    norm.__new__ = unguarded
