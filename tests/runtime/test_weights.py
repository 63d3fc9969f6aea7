from __future__ import annotations

import pytest
from torch import nn

from spec_compile.errors import ChannelError
from spec_compile.plan import Plan
from spec_compile.runtime.threads import thread_worlds
from spec_compile.runtime.weights import export_weights


@pytest.mark.parametrize("rank", [0, 1], ids=["receives", "sends"])
def test_an_export_whose_peers_do_not_come_says_that_all_must(rank: int) -> None:
    module = nn.Linear(3, 2)
    owners: dict[str, tuple[int, ...]] = {"weight": (1,), "bias": (1,)}
    fabric = thread_worlds(Plan(pp=2, timeout_s=0.05))[rank].fabrics["pp"]
    with pytest.raises(ChannelError, match=r"'pp'.*export_weights is collective: .* every rank"):
        list(export_weights(module, owners, fabric, None))
