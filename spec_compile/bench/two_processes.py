"""Run one function in two fresh processes that can join as ranks."""

from __future__ import annotations

import multiprocessing
import os
import queue
import socket
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from spec_compile.errors import ChannelError


def spawn(body: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call ``body(rank, *arguments)`` in two fresh processes; return both values.

    Raises:
        ChannelError: one ended without a value.
    """
    [values] = stream(_once, body, arguments)
    return values


def stream(body: Callable[..., Iterator[Any]], *arguments: Any) -> Iterator[list[Any]]:
    """Iterate over ``body(rank, *arguments)`` in two fresh processes; yield both values as they come.

    Each has one thread for operations on the CPU, as torchrun's have: several times as many threads as cores
    would wait for each other.

    Raises:
        ChannelError: one ended before it was through.
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
    values: tuple[deque[Any], deque[Any]] = (deque(), deque())
    running = 2
    while running:
        try:
            rank, error, found = results.get(timeout=0.2)
        except queue.Empty:
            if any(child.exitcode for child in children):
                raise ChannelError("a process of the benchmark ended; see its output") from None
            continue
        if error is not None:
            raise ChannelError(f"rank {rank} of the benchmark: {error}")
        running -= not found
        values[rank].extend(found)
        if values[0] and values[1]:
            yield [own.popleft() for own in values]
    for child in children:
        child.join()


def _once(rank: int, body: Callable[..., Any], arguments: Any) -> Iterator[Any]:
    yield body(rank, *arguments)


def _child(rank: int, port: int, results: Any, body: Callable[..., Any], arguments: Any) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    error = None
    try:
        for value in body(rank, *arguments):
            results.put((rank, None, [value]))
    except Exception as failure:  # told by the parent
        error = f"{type(failure).__name__}: {failure}"
    results.put((rank, error, []))
    results.close()
    results.join_thread()
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
