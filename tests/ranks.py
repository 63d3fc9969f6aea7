"""Run a test on several ranks: threads of this process, or processes forked from it."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import queue
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

T = TypeVar("T")


@dataclass
class Outcome:
    """How one rank ended."""

    rank: int
    value: Any = None
    error: BaseException | None = None
    """What the rank raised; None also when it was killed."""
    text: str = ""
    """The formatted traceback of ``error``."""
    exitcode: int | None = None
    """None: it had to be killed because the time was up."""
    ended: float = 0.0
    """time.monotonic() at the end of the function."""


def run_threads(world_size: int, fn: Callable[[int], T], *, timeout: float = 60.0) -> list[T]:
    """Call ``fn(rank)`` on one thread a rank; return the values or raise the first error."""
    values: dict[int, T] = {}
    errors: list[BaseException] = []

    def body(rank: int) -> None:
        try:
            values[rank] = fn(rank)
        except BaseException as error:  # re-raised by the caller's thread
            errors.append(error)

    threads = [threading.Thread(target=body, args=(r,), daemon=True) for r in range(world_size)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    if errors:
        raise errors[0]
    late = [rank for rank in range(world_size) if threads[rank].is_alive()]
    assert not late, f"ranks {late} did not end within {timeout} s"
    return [values[rank] for rank in range(world_size)]


def run_processes(
    world_size: int, fn: Callable[[int], T], *, timeout: float = 60.0, method: str = "fork"
) -> list[T]:
    """Call ``fn(rank)`` in one forked process a rank; return the values or raise the first error.

    The environment holds what torchrun sets. Values and errors must be picklable.
    """
    outcomes = process_outcomes(world_size, fn, timeout=timeout, method=method)
    failed = sorted((o for o in outcomes if o.error is not None), key=lambda o: o.ended)
    if failed:
        assert failed[0].error is not None
        failed[0].error.add_note(f"rank {failed[0].rank}:\n{failed[0].text}")
        raise failed[0].error
    codes = [outcome.exitcode for outcome in outcomes]
    assert codes == [0] * world_size, f"exit codes {codes} (None: still running after {timeout} s)"
    return [outcome.value for outcome in outcomes]


def process_outcomes(
    world_size: int,
    fn: Callable[[int], Any],
    *,
    timeout: float = 60.0,
    during: Callable[[list[int]], None] | None = None,
    method: str = "fork",
) -> list[Outcome]:
    """Call ``fn(rank)`` in one forked process a rank and tell how each ended.

    Args:
        world_size: number of processes.
        fn: any callable, closures included; for "spawn" one that can be pickled.
        timeout: seconds after which processes still running are killed.
        during: called with the process ids while they run, to signal them.
        method: "spawn" where CUDA is used: it does not survive a fork.
    """
    context: Any = multiprocessing.get_context(method)
    results: Any = context.Queue()
    port = free_port()
    processes = [
        context.Process(target=_child, args=(rank, world_size, port, fn, results), daemon=True)
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    if during is not None:
        pids = [process.pid or 0 for process in processes]
        threading.Thread(target=during, args=(pids,), daemon=True).start()
    outcomes = _collect(processes, results, time.monotonic() + timeout)
    for process in processes:
        if process.is_alive():
            os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
    return outcomes


def _collect(processes: list[Any], results: Any, end: float) -> list[Outcome]:
    outcomes = [Outcome(rank) for rank in range(len(processes))]
    while time.monotonic() < end:
        running = any(process.is_alive() for process in processes)
        try:
            outcome = pickle.loads(results.get(timeout=0.02))
            outcomes[outcome.rank] = outcome
        except queue.Empty:
            if not running:
                break
    for outcome, process in zip(outcomes, processes, strict=True):
        outcome.exitcode = process.exitcode
    return outcomes


def _child(rank: int, world_size: int, port: int, fn: Callable[[int], Any], results: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    outcome = Outcome(rank)
    try:
        outcome.value = fn(rank)
    except BaseException as error:  # reported to the parent
        outcome.error = error
        outcome.text = traceback.format_exc()
    outcome.ended = time.monotonic()
    results.put(_pickled(outcome))
    results.close()
    results.join_thread()


def _pickled(outcome: Outcome) -> bytes:
    """Pickle here, not in the queue's thread, and by value: shared memory ends with its process."""
    try:
        return pickle.dumps(outcome)
    except Exception as error:  # the test must see that its value or error cannot travel
        text = f"{outcome.text}\ncannot send {outcome.value!r} or {outcome.error!r}: {error!r}"
        return pickle.dumps(Outcome(outcome.rank, error=RuntimeError(text), text=text))


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
