"""What a pass is: a frozen description of one rewrite, called with a graph."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch.fx import GraphModule


class Cap(enum.Enum):
    """Facts about the graph that passes need and leave behind."""

    CANONICAL = "canonical"
    REGIONS_INLINE = "regions inline"
    ROLES = "roles marked"
    ATTENTION_DECLARED = "every attention declared"
    BRANCHES = "branches found"
    LOCAL = "token-local"
    LIVE = "dead rows hidden"
    SHARDED = "rows sharded"
    STRATEGY = "strategies chosen"
    PARTIALS = "attention split"
    LOSSES = "losses chunked"
    STAGES = "stages assigned"
    TAPS = "taps explicit"


@dataclass(frozen=True)
class PassResult:
    """The graph after a pass, and how many places it changed."""

    gm: GraphModule
    changes: int


class GraphPass(Protocol):
    """One rewrite; its fields are its whole configuration."""

    requires: ClassVar[frozenset[Cap]]
    provides: ClassVar[frozenset[Cap]]

    def __call__(self, gm: GraphModule) -> PassResult:
        """Rewrite the graph in place or return a new one."""
