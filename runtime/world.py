"""A world: this rank's place in the plan, its control plane, and its groups' fabrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from spec_compile.plan import Plan

from .collectives import PairwiseFabric
from .fabric import Control


@dataclass(frozen=True)
class Coordinates:
    """Index along each axis of the plan."""

    pp: int
    dp: int
    cp: int


@dataclass(frozen=True)
class World:
    """Everything that one rank needs to talk to the others."""

    rank: int
    size: int
    device: torch.device
    control: Control
    coordinates: Coordinates
    fabrics: Mapping[str, PairwiseFabric]
    """"cp", "grads", "pp", and "tied" on the first and last of several stages."""

    def close(self) -> None:
        """Free the fabrics' groups and leave the control plane; idempotent."""
        for fabric in self.fabrics.values():
            fabric.close()
        self.control.close()


def coordinates(plan: Plan, rank: int) -> Coordinates:
    """Place ``rank`` in the plan: pp outermost, then dp, then cp."""
    return Coordinates(
        pp=rank // (plan.dp * plan.cp), dp=rank // plan.cp % plan.dp, cp=rank % plan.cp
    )


def group_ranks(plan: Plan) -> dict[str, list[list[int]]]:
    """List every group of every fabric as global ranks, in group order; the same on all ranks.

    "cp": same stage and dp index; "grads": same stage (dp, then cp); "pp": same dp and cp index, by
    stage; "tied": the first and last of several stages, same dp and cp index.
    """
    width = plan.dp * plan.cp
    columns = [list(range(r, plan.world_size, width)) for r in range(width)]
    groups = {
        "cp": [list(range(r, r + plan.cp)) for r in range(0, plan.world_size, plan.cp)],
        "grads": [list(range(r, r + width)) for r in range(0, plan.world_size, width)],
        "pp": columns,
    }
    if plan.pp > 1:
        groups["tied"] = [[column[0], column[-1]] for column in columns]
    return groups


def own_groups(plan: Plan, rank: int) -> dict[str, list[int]]:
    """Choose from `group_ranks` the group of each name that holds ``rank``."""
    return {
        name: ranks
        for name, groups in group_ranks(plan).items()
        for ranks in groups
        if rank in ranks
    }
