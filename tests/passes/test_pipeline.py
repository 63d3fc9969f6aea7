"""The passes as a whole: their order, their invariants, and the text that people read."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch.fx import GraphModule

import spec_compile as sc
from spec_compile import Plan
from spec_compile.capture.trace import capture
from spec_compile.errors import InvariantError, PassError
from spec_compile.ir.facts import KEY
from spec_compile.ir.meta import info, update
from spec_compile.ir.placement import PARTIAL
from spec_compile.ir.printer import format_graph
from spec_compile.ir.verify import verify
from spec_compile.lowering import _first_facts
from spec_compile.passes.base import Cap, PassResult
from spec_compile.passes.canonicalize import Canonicalize
from spec_compile.passes.cast_parameters import CastParameters
from spec_compile.passes.inline_regions import InlineRegions
from spec_compile.passes.out_of_place import OutOfPlace
from spec_compile.passes.pipeline import check_order, default_passes, run
from tests.models import randomise, tiny_llama

ops = torch.ops.spec_compile
PLAN = Plan(cp=2, pp=2)
GOLDEN = Path(__file__).parent / "golden"


class Tiny(torch.nn.Module):
    """Two taps, one shift, one attention with one diagonal branch."""

    taps = (0, 1)

    def __init__(self) -> None:
        super().__init__()
        self.mix = torch.nn.Linear(16, 8, bias=False)

    def forward(self, inputs: sc.DraftInputs) -> sc.DraftOutput:
        h = self.mix(inputs.features)[:, None]
        h = sc.branch_attention(
            h,
            h,
            h,
            [(h * 2, h, inputs.index, inputs.index)],
            q_limit=inputs.index + 1,
            q_document=inputs.document,
            k_document=inputs.document,
        )
        far = sc.shift(h.flatten(1), 1, inputs.document)
        loss = torch.where(inputs.loss_mask, far.square().sum(-1), 0.0).sum()
        return sc.DraftOutput(loss.sqrt() + 1, inputs.loss_mask.sum())


def captured(draft: bool = True) -> GraphModule:
    target = tiny_llama(layers=2, hidden=8, vocab=13, heads=2)
    found = capture(target, randomise(Tiny().double(), 1) if draft else None)
    found.graph_module.meta[KEY] = _first_facts(found, PLAN)
    return found.graph_module


@pytest.fixture(scope="module")
def joint() -> GraphModule:
    """The whole graph after all passes; tests change copies."""
    return run(captured(), default_passes(PLAN))[0]


def test_the_default_order_gives_every_pass_what_it_needs() -> None:
    for plan in (Plan(), PLAN, Plan(cp=4, pp=3, cp_strategy="ring")):
        check_order(default_passes(plan))


@pytest.mark.parametrize("missing", range(len(default_passes(PLAN))))
def test_an_order_without_a_needed_pass_is_refused(missing: int) -> None:
    passes = list(default_passes(PLAN))
    removed = passes.pop(missing)
    later = frozenset().union(*(p.requires for p in passes[missing:]))
    if removed.provides & later:
        with pytest.raises(PassError, match="no earlier pass provides"):
            check_order(tuple(passes))
    else:
        check_order(tuple(passes))


def test_a_failing_pass_is_named() -> None:
    class Breaks:
        requires: ClassVar[frozenset[Cap]] = frozenset()
        provides: ClassVar[frozenset[Cap]] = frozenset()

        def __call__(self, gm: GraphModule) -> PassResult:
            raise ZeroDivisionError("by nothing")

        def __repr__(self) -> str:
            return "Breaks()"

    with pytest.raises(PassError, match=r"Breaks\(\).*by nothing"):
        run(captured(draft=False), (Breaks(),))


def test_a_pass_that_fails_at_a_node_names_its_line(joint: GraphModule) -> None:
    class Breaks(CastParameters):
        def __call__(self, gm: GraphModule) -> PassResult:
            *_, node = (n for n in gm.graph.nodes if "shift" in str(n.target))
            return PassResult(gm, node.args[0].no_such_thing)

    line = r"test_pipeline.py:\d+ in forward: far = sc.shift"
    with pytest.raises(PassError, match=rf"(?s)pass .*{line}.*shift.*no_such_thing.*write it"):
        run(copy.deepcopy(joint), (Breaks(),))


@pytest.mark.parametrize("item", [InlineRegions(), OutOfPlace(), Canonicalize()])
def test_cleaning_passes_change_nothing_the_second_time(item: Any) -> None:
    gm = captured()
    for each in (InlineRegions(), OutOfPlace(), Canonicalize()):
        gm = each(gm).gm
    text = format_graph(gm)
    result = item(gm)
    assert result.changes == 0
    assert format_graph(result.gm) == text


def test_without_a_draft_no_tap_and_no_sum_is_made() -> None:
    gm, _ = run(captured(draft=False), default_passes(PLAN))
    names = {str(node.target) for node in gm.graph.nodes}
    assert not [n for n in names if "tap_" in n or "sum_rows" in n]


def find(gm: GraphModule, target: Any) -> Any:
    return next(node for node in gm.graph.nodes if node.target == target)


def test_a_dropped_tap_recv_is_caught(joint: GraphModule) -> None:
    gm = copy.deepcopy(joint)
    received, sent = find(gm, ops.tap_recv.default), find(gm, ops.tap_send.default)
    for part in list(received.users):
        part.replace_all_uses_with(sent.args[0][part.args[1]])
        gm.graph.erase_node(part)
    gm.graph.erase_node(received)
    with pytest.raises(InvariantError, match="after X: invariant 4"):
        verify(gm, after="X")


def test_an_edge_across_stages_is_caught(joint: GraphModule) -> None:
    gm = copy.deepcopy(joint)
    received, sent = find(gm, ops.tap_recv.default), find(gm, ops.tap_send.default)
    part = next(iter(received.users))
    part.replace_all_uses_with(sent.args[0][part.args[1]])
    with pytest.raises(
        InvariantError, match=r"(?s)after X: invariant 6.*of stage 1 reads .* of stage 0"
    ):
        verify(gm, after="X")


def test_a_partial_sum_read_by_a_nonlinear_operator_is_caught(joint: GraphModule) -> None:
    gm = copy.deepcopy(joint)
    summed = find(gm, ops.sum_rows.default)
    assert info(summed.args[0]).placement == PARTIAL
    summed.replace_all_uses_with(summed.args[0])
    with pytest.raises(InvariantError, match=r"after X: invariant 5.*sqrt"):
        verify(gm, after="X")


@pytest.mark.parametrize("key", ["spec", "val"])
def test_a_node_without_facts_or_value_is_caught(joint: GraphModule, key: str) -> None:
    gm = copy.deepcopy(joint)
    del find(gm, torch.ops.aten.linear.default).meta[key]
    with pytest.raises(InvariantError, match="after X: invariant 2"):
        verify(gm, after="X")


def test_an_input_out_of_order_is_caught(joint: GraphModule) -> None:
    gm = copy.deepcopy(joint)
    places = [n for n in gm.graph.nodes if n.op == "placeholder"]
    places[0].prepend(places[1])
    with pytest.raises(InvariantError, match="after X: invariant 3"):
        verify(gm, after="X")


def test_a_value_used_before_it_is_made_is_caught(joint: GraphModule) -> None:
    gm = copy.deepcopy(joint)
    node = find(gm, torch.ops.aten.linear.default)
    node.append(node.args[0])
    with pytest.raises(InvariantError, match="after X: invariant 1"):
        verify(gm, after="X")


def test_facts_can_be_changed_on_a_copy_alone(joint: GraphModule) -> None:
    gm = copy.deepcopy(joint)
    node = find(gm, torch.ops.aten.linear.default)
    update(node, stage=7)
    assert info(find(joint, torch.ops.aten.linear.default)).stage != 7


@pytest.mark.parametrize("stage", ["stage0", "stage1"])
def test_stage_graphs_read_as_recorded(stage: str, request: pytest.FixtureRequest) -> None:
    """The text of a small step; regenerate a file by deleting it and running this test twice."""
    target = tiny_llama(layers=2, hidden=8, vocab=13, heads=2)
    lowered = sc.lower(target, randomise(Tiny().double(), 1), PLAN)
    lines = format_graph(lowered.graphs[stage]).splitlines()
    declared = [line for line in lines if "spec_compile." in line or "output" in line]
    text = "\n".join(re.sub(r"%\d+", "%", line) for line in declared) + "\n"
    path = GOLDEN / f"{stage}.txt"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        pytest.fail(f"wrote {path.name}; read it and run again")
    assert text == path.read_text()


def test_the_text_of_a_graph_is_that_of_every_rank_whatever_its_gpu_is_called() -> None:
    def on(device: str) -> str:
        graph = torch.fx.Graph()
        made = graph.call_function(
            torch.ops.aten.arange.default, (4,), {"device": torch.device(device)}
        )
        moved = graph.call_function(torch.ops.aten.to.device, (made, torch.device(device)))
        graph.output([moved])
        return format_graph(torch.fx.GraphModule(torch.nn.Module(), graph))

    assert on("cuda:0") == on("cuda:1")
    assert on("cuda:0") != on("cpu")
