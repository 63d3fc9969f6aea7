"""Start ranks as processes of this machine, and end all of them whatever happens to one."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # glibc's malloc.h
GRACE_S = 20.0
"""How long the others may take to report that a rank failed, before they are ended."""


def run_ranks(world_size: int, body: Callable[[int], None], *, grace_s: float = GRACE_S) -> None:
    """Call ``body(rank)`` in one forked process a rank, with torch.distributed initialised.

    Each uses one thread: more only get in each other's way on few cores. An interrupt, a SIGTERM or
    the death of this process ends all of them.

    Raises:
        SystemExit: a rank failed; its traceback is on stderr.
    """
    context = multiprocessing.get_context("fork")
    reader, writer = os.pipe()  # it closes when this process ends, even by SIGKILL
    with tempfile.TemporaryDirectory(prefix="spec_compile_demo") as folder:
        store = Path(folder) / "rendezvous"
        processes = [
            context.Process(
                target=_child, args=(rank, world_size, store, body, reader, writer), daemon=True
            )
            for rank in range(world_size)
        ]
        before = signal.signal(signal.SIGTERM, _terminated)
        try:
            for process in processes:
                process.start()
            _watch(processes, grace_s)
        finally:
            signal.signal(signal.SIGTERM, before)
            _end(processes)
            os.close(reader)
            os.close(writer)
    codes = {rank: p.exitcode for rank, p in enumerate(processes) if p.exitcode}
    if codes:
        raise SystemExit(
            f"ranks failed, with exit codes {codes}; the first traceback above says why"
        )


def everyone(value: Any) -> list[Any]:
    """Gather a value of every rank, in rank order."""
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _watch(processes: list[Any], grace_s: float) -> None:
    running: dict[Any, Any] = {process.sentinel: process for process in processes}
    deadline: float | None = None
    while running and (deadline is None or time.monotonic() < deadline):
        for sentinel in wait(list(running), timeout=1.0):
            process = running.pop(sentinel)
            process.join()  # the sentinel closes a moment before there is an exit code
            if process.exitcode and deadline is None:
                deadline = time.monotonic() + grace_s


def _end(processes: list[Any]) -> None:
    started = [process for process in processes if process.pid is not None]
    for process in started:
        process.terminate()
    for process in started:
        process.join(2.0)
        if process.is_alive():
            process.kill()
            process.join()


def _terminated(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def _child(
    rank: int, world_size: int, store: Path, body: Callable[[int], None], reader: int, writer: int
) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent has it too, and ends this process
    os.close(writer)
    threading.Thread(target=_exit_with_parent, args=(reader,), daemon=True).start()
    torch.set_num_threads(1)
    _keep_freed_memory()
    # A store in a file: no port to lose to somebody else, nothing to clean up after a crash.
    meeting = dist.FileStore(str(store), world_size)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=world_size)
    quiet = contextlib.nullcontext() if rank == 0 else contextlib.redirect_stdout(None)
    with quiet:
        body(rank)
    dist.destroy_process_group()


def _keep_freed_memory() -> None:
    """Let glibc reuse large blocks: a fresh page costs more than the sum that is written to it."""
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
        if mallopt is not None:
            mallopt(M_MMAP_MAX, 0)
            mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def _exit_with_parent(reader: int) -> None:
    os.read(reader, 1)  # nobody writes: it returns when the parent is gone
    os._exit(1)
