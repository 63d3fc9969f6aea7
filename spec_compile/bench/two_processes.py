"""Run one function in two fresh processes that can join as ranks."""

from __future__ import annotations

import multiprocessing
import os
import queue
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from spec_compile.errors import ChannelError


def spawn(body: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call ``body(rank, *arguments)`` in two fresh processes; return both values.

    Raises:
        ChannelError: one ended without a value.
    """
    context = multiprocessing.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results: Any = context.Queue()
    children = [
        context.Process(target=_child, args=(rank, port, results, body, arguments), daemon=True)
        for rank in range(2)
    ]
    for child in children:
        child.start()
    values: dict[int, Any] = {}
    while len(values) < 2:
        try:
            rank, error, value = results.get(timeout=0.2)
        except queue.Empty:
            if any(child.exitcode for child in children):
                raise ChannelError("a process of the benchmark ended; see its output") from None
            continue
        if error is not None:
            raise ChannelError(f"rank {rank} of the benchmark: {error}")
        values[rank] = value
    for child in children:
        child.join()
    return [values[0], values[1]]


def _child(rank: int, port: int, results: Any, body: Callable[..., Any], arguments: Any) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    error, value = None, None
    try:
        value = body(rank, *arguments)
    except Exception as failure:  # told by the parent
        error = f"{type(failure).__name__}: {failure}"
    results.put((rank, error, value))
    results.close()
    results.join_thread()
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
