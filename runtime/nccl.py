"""A fabric over NCCL, for groups that span hosts: one GPU a rank.

NCCL matches messages of a pair of ranks in the order in which both sides queue them, knows no tags,
and runs the calls of one communicator one after the other. So each group has three: one for
collectives, one for messages to higher ranks and one for messages to lower ranks, whose chains of
waits end at the highest and the lowest rank. What was queued is told over the control plane; a
receiver queues all that came before the message that it wants, and keeps it.
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spec_compile.errors import ChannelError

from .collectives import Message, PairwiseFabric
from .control import SocketControl
from .polling import poll

PURPOSES = ("both", "up", "down")
"""Collectives, messages to higher ranks, messages to lower ranks."""


class NcclFabric(PairwiseFabric):
    """A group of processes with a GPU each.

    Calls return when their work is queued, as usual with CUDA.

    Args:
        name: the name under which operators look it up.
        groups: of `nccl_groups`.
        control: whose failures end every wait.
        device: of the tensors.
        timeout_s: deadline of every wait.
        messages: whether ranks send to single others, for which pairs are connected now.
    """

    def __init__(
        self,
        name: str,
        groups: Sequence[dist.ProcessGroup],
        control: SocketControl,
        *,
        device: torch.device,
        timeout_s: float,
        messages: bool = True,
    ) -> None:
        both = groups[0]
        super().__init__(
            name, dist.get_rank(both), dist.get_world_size(both), device, control.latch
        )
        self._control = control
        self._groups = dict(zip(PURPOSES, groups, strict=True))
        self._ranks = dist.get_process_group_ranks(both)
        self._timeout_s = timeout_s
        self._sent: list[tuple[dist.Work, Tensor]] = []
        # made here, as two threads use them: either would make one of its own at a first look
        self._noted: dict[int, deque[tuple[int, int, str]]] = {r: deque() for r in range(self.size)}
        self._early: defaultdict[tuple[int, int], deque[Tensor]] = defaultdict(deque)
        self._dying = threading.Lock()
        control.listen(f"nccl {name}", self._note)
        control.subscribe(self._abort)
        for purpose in PURPOSES[1:] if messages and self.size > 1 else ():
            self._connect(purpose)

    def close(self) -> None:
        """Destroy the groups, never the default one; idempotent."""
        super().close()
        self._latch.unsubscribe(self._abort)
        with self._dying:
            groups, self._groups = self._groups, {}
        self._sent.clear()
        for group in groups.values():
            dist.destroy_process_group(group)

    def _swap(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        ops = [self._op(dist.irecv, x, src, "both") for src, x in receives]
        ops += [self._op(dist.isend, x, dst, "both") for dst, x in sends]
        for work in self._queue(ops):
            work.wait()

    def _post(self, x: Tensor, dst: int, lane: int) -> None:
        op = self._op(dist.isend, x, dst, "up" if dst > self.rank else "down")
        self._sent += [(work, x) for work in self._queue([op])]
        note = [self.rank, lane, x.numel(), str(x.dtype).removeprefix("torch.")]
        self._control.tell(self._ranks[dst], f"nccl {self.name}", note)

    def _take(self, out: Tensor, src: int, lane: int) -> None:
        while not self._early[src, lane]:
            poll(
                lambda: bool(self._noted[src]),
                self._control.check,
                self._timeout_s,
                lambda: f"fabric {self.name!r}, rank {src} -> rank {self.rank}: tag {lane - 1}",
            )
            found, numel, dtype = self._noted[src].popleft()
            place = out.view(-1)
            if found != lane or numel != out.numel() or dtype != str(out.dtype)[6:]:
                place = torch.empty(numel, dtype=getattr(torch, dtype), device=self.device)
            op = self._op(dist.irecv, place, src, "up" if src < self.rank else "down")
            for work in self._queue([op]):
                work.wait()
            self._early[src, found].append(place)
        value = self._early[src, lane].popleft()
        if value.numel() != out.numel() or value.dtype != out.dtype:
            raise ChannelError(
                f"fabric {self.name!r}: rank {self.rank} expected {tuple(out.shape)} {out.dtype} "
                f"from rank {src}, found {value.numel()} elements of {value.dtype}"
            )
        if value.data_ptr() != out.data_ptr():
            out.copy_(value.view(out.shape))

    def _drain(self) -> None:
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def _connect(self, purpose: str) -> None:
        """Exchange with every peer at once.

        NCCL connects a pair of ranks at their first message, and holds the sender's host until the receiver's is
        there: two that send to each other before they receive would wait for ever. Collectives send and receive
        at once, and need no such care.
        """
        before, behind = range(self.rank), range(self.rank + 1, self.size)
        sources, targets = (before, behind) if purpose == "up" else (behind, before)
        word = torch.zeros(2, self.size, device=self.device)
        ops = [self._op(dist.irecv, word[0, r : r + 1], r, purpose) for r in sources]
        ops += [self._op(dist.isend, word[1, r : r + 1], r, purpose) for r in targets]
        for work in self._queue(ops):
            work.wait()
        torch.cuda.current_stream(self.device).synchronize()

    def _op(self, op: Any, x: Tensor, peer: int, group: str) -> dist.P2POp:
        if x.device != self.device:
            raise ChannelError(
                f"fabric {self.name!r} moves tensors of {self.device}, found {x.device}"
            )
        self.check()
        return dist.P2POp(op, x, self._ranks[peer], self._groups[group])

    def _queue(self, ops: list[dist.P2POp]) -> list[dist.Work]:
        try:
            works: list[dist.Work] = dist.batch_isend_irecv(ops)
        except (RuntimeError, ValueError) as error:
            self._broken = f"it broke before: {str(error)[:400]}"
            self._control.check()
            raise ChannelError(f"fabric {self.name!r} (NCCL) broke: {error}") from error
        return works

    def _note(self, note: Any) -> None:
        """Hear from another rank what it has queued; runs on the control thread."""
        src, lane, numel, dtype = note
        self._noted[int(src)].append((int(lane), int(numel), str(dtype)))

    def _abort(self) -> None:
        """End everything that is queued, from a thread of its own, as it may take a while."""

        def work() -> None:
            with self._dying:
                for group in self._groups.values():
                    with contextlib.suppress(RuntimeError):
                        group.abort()

        # no daemon: a thread that the interpreter's end unwinds inside c10d aborts the process
        with contextlib.suppress(RuntimeError):  # the interpreter ends: nothing waits any more
            threading.Thread(target=work, name="spec_compile abort", daemon=False).start()


def nccl_groups(
    ranks: list[int], timeout: timedelta, device: torch.device
) -> list[dist.ProcessGroup]:
    """Make the three groups of a fabric; every rank of the world calls it, members or not."""
    return [
        dist.new_group(
            ranks,
            timeout=timeout,
            backend="nccl",
            device_id=device,
            group_desc=f"spec_compile {purpose}",
        )
        for purpose in PURPOSES
    ]
