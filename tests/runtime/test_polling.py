"""The pauses of a host's wait."""

from __future__ import annotations

from unittest import mock

import pytest

from spec_compile.errors import ChannelError
from spec_compile.runtime import polling
from spec_compile.runtime.polling import LONGEST_PAUSE_S, SPIN_S, poll


class Clock:
    """A clock that moves by what is slept, and by 10 us a look at it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []
        self.yields = 0

    def monotonic(self) -> float:
        self.now += 1e-5
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def sched_yield(self) -> None:
        self.yields += 1


def test_a_wait_spins_for_a_bounded_time_and_then_adds_an_eighth_at_most() -> None:
    clock = Clock()
    with (
        mock.patch.object(polling, "time", clock),
        mock.patch.object(polling, "os", clock),
        pytest.raises(ChannelError, match="a word did not come within 1 s"),
    ):
        poll(lambda: False, lambda: None, 1.0, lambda: "a word")
    assert clock.yields == pytest.approx(SPIN_S / 1e-5, abs=2)
    assert clock.slept[0] == pytest.approx(SPIN_S / 8, rel=0.1)
    assert sorted(clock.slept) == clock.slept
    assert clock.slept[-1] == LONGEST_PAUSE_S
