"""Waits of a host for something that no event tells."""

from __future__ import annotations

import time
from collections.abc import Callable

from spec_compile.errors import ChannelError

SPINS = 50
LONGEST_PAUSE_S = 5e-4


def poll(
    done: Callable[[], bool], check: Callable[[], None], timeout_s: float, what: Callable[[], str]
) -> None:
    """Wait until ``done``: spin first, then sleep up to 0.5 ms.

    Args:
        done: tells whether the wait is over.
        check: raises the failure of a peer, which ends the wait.
        timeout_s: deadline, in seconds.
        what: says what was awaited.

    Raises:
        ChannelError: the deadline passed.
    """
    end = time.monotonic() + timeout_s
    pause = 0.0
    for turn in range(1 << 62):
        if done():
            return
        check()
        if time.monotonic() > end:
            break
        time.sleep(pause)
        if turn > SPINS:
            pause = min(max(2e-5, 2 * pause), LONGEST_PAUSE_S)
    raise ChannelError(
        f"{what()} did not come within {timeout_s:g} s; check that all ranks make the same calls in "
        "the same order"
    )
