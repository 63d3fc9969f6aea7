"""The order of the passes, and the driver that runs, times, checks and records them."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from spec_compile.analysis.row_rules import KNOWN_ON_ROWS
from spec_compile.errors import PassError, SpecCompileError
from spec_compile.ir.meta import at_node
from spec_compile.ir.printer import format_graph
from spec_compile.ir.verify import verify
from spec_compile.plan import Plan

from .assign_stages import AssignStages
from .base import Cap, GraphPass
from .canonicalize import Canonicalize
from .cast_parameters import CastParameters
from .check_locality import CheckLocality
from .choose_strategy import ChooseStrategy
from .chunk_losses import ChunkLosses
from .find_branches import FindBranches
from .fuse_norms import FuseNorms
from .hide_dead_rows import HideDeadRows
from .inline_regions import InlineRegions
from .insert_taps import InsertTaps
from .lower_row_shifts import LowerRowShifts
from .mark_roles import MarkRoles
from .out_of_place import OutOfPlace
from .recognise_attention import RecogniseAttention
from .refuse_random import RefuseRandom
from .shard_context import ShardContext
from .share_embeddings import ShareEmbeddings
from .skip_masked_rows import SkipMaskedRows
from .split_attention import SplitAttention
from .take_rows_apart import TakeRowsApart

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PassRecord:
    """What one pass did."""

    name: str
    seconds: float
    changes: int
    before: str
    """Text of the graph before the pass."""
    after: str


def default_passes(plan: Plan) -> tuple[GraphPass, ...]:
    """The passes of a plan, in order."""
    dealt = plan.micro_batches > 1 or bool(plan.max_tokens_per_micro_batch)
    return (
        CastParameters(),
        InlineRegions(),
        OutOfPlace(),
        Canonicalize(),  # after the regions, so that equal rotary tables inside them become one
        MarkRoles(),
        RecogniseAttention(dealt),
        TakeRowsApart(),
        FindBranches(),
        RefuseRandom(),
        CheckLocality(plan.cp),
        HideDeadRows(),
        ShardContext(plan.cp),
        LowerRowShifts(dealt),
        ChooseStrategy(plan.cp, plan.cp_strategy),
        SplitAttention(),
        ChunkLosses(),
        SkipMaskedRows(),
        FuseNorms(),
        ShareEmbeddings(plan.pp),
        AssignStages(plan.pp, plan.num_stages // plan.pp),
        InsertTaps(),
    )


def check_order(passes: tuple[GraphPass, ...]) -> None:
    """Refuse an order in which a pass needs a fact that no earlier pass provides.

    Raises:
        PassError: names the pass and the missing facts.
    """
    have: set[Cap] = set()
    for item in passes:
        missing = item.requires - have
        if missing:
            names = ", ".join(sorted(cap.value for cap in missing))
            raise PassError(
                f"{type(item).__name__} needs '{names}', which no earlier pass provides"
            )
        have |= item.provides


def run(gm: GraphModule, passes: tuple[GraphPass, ...]) -> tuple[GraphModule, list[PassRecord]]:
    """Run the passes in order with the invariants between them.

    Raises:
        PassError: a pass failed for a reason that is not the user's; names the pass.
        SpecCompileError: the models and the plan do not fit (from the pass itself).
    """
    check_order(passes)
    records: list[PassRecord] = []
    text = format_graph(gm)
    for item in passes:
        name, start = type(item).__name__, time.perf_counter()
        try:
            result = item(gm)
        except SpecCompileError:
            raise
        except Exception as error:
            node, problem = _node_of(error), f"{type(error).__name__}: {error}"
            if node is not None:
                problem = at_node(node, f"could not be rewritten ({problem}); {KNOWN_ON_ROWS}")
            raise PassError(f"pass {item!r} failed: {problem}") from error
        gm = result.gm
        gm.recompile()
        verify(gm, after=name)
        after = format_graph(gm)
        records.append(PassRecord(name, time.perf_counter() - start, result.changes, text, after))
        text = after
        log.debug("%s: %d changes", name, result.changes)
    return gm, records


def _node_of(error: BaseException) -> Node | None:
    """The node that a pass was at: a local variable, if possible ``node``, of the innermost frame that has one."""
    found = None
    trace = error.__traceback__
    while trace is not None:
        known = trace.tb_frame.f_locals
        nodes = [x for x in (known.get("node"), *known.values()) if isinstance(x, Node)]
        found = nodes[0] if nodes else found
        trace = trace.tb_next
    return found
