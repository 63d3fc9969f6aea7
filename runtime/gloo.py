"""A fabric over a c10d group of gloo, for CPU tensors."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.util import Finalize
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spec_compile.errors import ChannelError

from .collectives import COLLECTIVE, Message, PairwiseFabric
from .control import SocketControl

POISON_LANE = 1 << 30
GRACE_S = 1.0
"""How long a broken connection waits for the control plane to say why."""
log = logging.getLogger(__name__)
_interrupts: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


class GlooFabric(PairwiseFabric):
    """A group of processes.

    A blocked gloo wait cannot be cancelled, and ``ProcessGroup.abort`` leaves it blocked. But a wait
    that times out closes every connection of its group, which ends all other waits of this process
    at once. So when the control plane reports a failure, another thread receives on a lane that
    nobody sends on, with a timeout of a millisecond.

    Args:
        name: the name under which operators look it up.
        group: a c10d group of its own, with more than one rank.
        control: whose failures end every wait.
        device: where `recv` puts tensors.
        timeout_s: deadline of every wait.
    """

    def __init__(
        self,
        name: str,
        group: dist.ProcessGroup,
        control: SocketControl,
        *,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        super().__init__(
            name, dist.get_rank(group), dist.get_world_size(group), device, control.latch
        )
        self._control = control
        self._group: dist.ProcessGroup | None = group
        self._ranks = dist.get_process_group_ranks(group)
        self._timeout_s = timeout_s
        self._posted: list[tuple[dist.Work, Tensor]] = []
        self._dying = threading.Lock()
        control.subscribe(self._on_failure)

    def close(self) -> None:
        """Destroy the group, never the default one; idempotent."""
        super().close()
        self._latch.unsubscribe(self._on_failure)
        with self._dying:
            group, self._group = self._group, None
        if group is not None:
            self._posted.clear()
            dist.destroy_process_group(group)

    def _swap(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        ops = [self._op(dist.irecv, x, src, COLLECTIVE) for src, x in receives]
        ops += [self._op(dist.isend, x, dst, COLLECTIVE) for dst, x in sends]
        self._finish(ops)

    def _post(self, x: Tensor, dst: int, lane: int) -> None:
        try:
            works = dist.batch_isend_irecv([self._op(dist.isend, x, dst, lane)])
        except (RuntimeError, ValueError) as error:
            raise self._lost(error) from error
        self._posted += [(work, x) for work in works]

    def _take(self, out: Tensor, src: int, lane: int) -> None:
        self._finish([self._op(dist.irecv, out, src, lane)])

    def _drain(self) -> None:
        self._wait([work for work, _ in self._posted])
        self._posted.clear()

    def _op(self, op: Callable[..., Any], x: Tensor, peer: int, lane: int) -> dist.P2POp:
        return dist.P2POp(op, x, self._ranks[peer], self._group, lane)

    def _finish(self, ops: list[dist.P2POp]) -> None:
        try:
            works = dist.batch_isend_irecv(ops)
        except (RuntimeError, ValueError) as error:
            raise self._lost(error) from error
        self._wait(works)

    def _wait(self, works: Sequence[dist.Work]) -> None:
        end = time.monotonic() + self._timeout_s
        try:
            for work in works:
                work.wait(timedelta(seconds=max(0.001, end - time.monotonic())))
        except RuntimeError as error:
            raise self._lost(error) from error

    def _lost(self, error: Exception) -> Exception:
        """Give the error to raise for one of c10d: the control plane's, where it knows why."""
        self._broken = f"it broke before: {str(error)[:400]}"
        end = time.monotonic() + GRACE_S
        while not self._left() and (time.monotonic() < end or self._control.silent()):
            if self._latch.wait(0.02):
                break
        self._interrupt()
        try:
            self._control.check()
        except Exception as reason:
            return reason
        left = self._left()
        why = f"ranks {left} closed their model" if left else "all ranks still have a heartbeat"
        return ChannelError(
            f"fabric {self.name!r} on its rank {self.rank} (global ranks {self._ranks}) broke or "
            f"missed its deadline of {self._timeout_s:g} s; {why}; check that all ranks make the "
            f"same calls in the same order. Found: {str(error)[:400]}"
        )

    def _left(self) -> list[int]:
        return [rank for rank in self._control.left() if rank in self._ranks]

    def _on_failure(self) -> None:
        # no daemon: a thread that the interpreter's end unwinds inside c10d aborts the process
        name = "spec_compile interrupt"
        thread = threading.Thread(target=self._interrupt, name=name, daemon=False)
        _interrupts.add(thread)
        with contextlib.suppress(RuntimeError):  # the interpreter ends: nothing waits any more
            thread.start()

    def _interrupt(self) -> None:
        """End all waits of this process in this group by closing its connections."""
        with self._dying:
            if self._group is None:
                return
            # a peer that has closed its connection already ends a receive at once, with no effect on the others
            for src in self._ranks:
                if src != self._ranks[self.rank]:
                    self._time_out(src)

    def _time_out(self, src: int) -> None:
        try:
            work = dist.irecv(torch.empty(1), src, self._group, POISON_LANE)
            if work is not None:
                work.wait(timedelta(milliseconds=1))
        except RuntimeError as error:
            log.debug("fabric %s closed its connections: %s", self.name, error)


def _join_interrupts() -> None:
    """Wait for interrupts that began after the interpreter had joined its threads."""
    for thread in list(_interrupts):
        if thread.is_alive():
            thread.join(GRACE_S)


# below the control plane's own priority: it ends first, and starts no more interrupts
Finalize(None, _join_interrupts, exitpriority=-1)
