"""Waits of a host for something that no event tells."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from spec_compile.errors import ChannelError

SPIN_S = 5e-4
"""How long a wait looks all the time; later it costs a small part of a core."""
LONGEST_PAUSE_S = 5e-4


class Backoff:
    """The pauses of one wait: none at first, then an eighth of what was waited so far, up to 0.5 ms."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def pause(self) -> float:
        """Let others run, and return how long the wait has lasted, in seconds."""
        waited = time.monotonic() - self._start
        if waited < SPIN_S:
            os.sched_yield()  # a sleep of 0 s takes 50 us and more: Linux adds the timer's slack
        else:
            time.sleep(min(waited / 8, LONGEST_PAUSE_S))
        return waited


def poll(
    done: Callable[[], bool], check: Callable[[], None], timeout_s: float, what: Callable[[], str]
) -> None:
    """Wait until ``done``, with the pauses of a `Backoff`.

    Args:
        done: tells whether the wait is over.
        check: raises the failure of a peer, which ends the wait.
        timeout_s: deadline, in seconds.
        what: says what was awaited.

    Raises:
        ChannelError: the deadline passed.
    """
    backoff = Backoff()
    while not done():
        check()
        if backoff.pause() > timeout_s:
            raise ChannelError(
                f"{what()} did not come within {timeout_s:g} s; check that all ranks make the same "
                "calls in the same order"
            )
