"""What only ranks that are threads of one process can get wrong."""

from __future__ import annotations

import time
from collections import deque

import torch
from torch import Tensor

from spec_compile.plan import Plan
from spec_compile.runtime.threads import ThreadFabric, thread_worlds
from tests.ranks import run_threads


def test_sender_and_receiver_that_meet_at_a_new_box_lose_no_message() -> None:
    worlds = thread_worlds(Plan(cp=3, timeout_s=5.0))
    fabric = worlds[0].fabrics["cp"]
    assert isinstance(fabric, ThreadFabric)

    def slow_box() -> deque[Tensor]:
        """As when garbage is collected just then: the other threads run on meanwhile."""
        box: deque[Tensor] = deque()
        time.sleep(0.02)
        return box

    fabric._hub.mail.default_factory = slow_box
    own = [torch.full((4,), float(rank)) for rank in range(3)]
    found = run_threads(3, lambda rank: worlds[rank].fabrics["cp"].all_gather(own[rank]))
    for value in found:
        assert torch.equal(value, torch.stack(own))
