"""The timeline: every action and tap of a step on its rank, once; and nothing when it is off."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

import pytest
import torch

from spec_compile import ParallelModel, Plan
from spec_compile.runtime import timeline
from spec_compile.runtime.timeline import Recorder, Span, recording, span
from spec_compile.runtime.timeline_picture import picture, seconds_by_kind
from tests.step_cases import batches, bound, clipped

PLAN = Plan(pp=2, micro_batches=3)


def test_a_step_is_drawn_with_every_action_and_tap(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "step.svg"
    batch = batches(1)[0]

    def body(model: ParallelModel, rank: int) -> None:
        model.step(batch, clipped)
        with model.timeline(path):
            model.step(batch, clipped)

    bound("llama", "eagle3", PLAN, body)
    tree = ElementTree.parse(path)
    titles = [e.text or "" for e in tree.iter("{http://www.w3.org/2000/svg}title")]
    kinds = Counter(title.split(",")[0] for title in titles)
    assert kinds["forward"] == kinds["backward"] == 6
    assert kinds["draft"] == 3
    assert kinds["send to the next stage"] == kinds["wait for another stage"] == 6
    assert kinds["push of taps"] == kinds["wait for taps"] == kinds["wait for a free slot"] == 3
    texts = [e.text or "" for e in tree.iter("{http://www.w3.org/2000/svg}text")]
    assert {"rank 0: pp0 dp0 cp0", "rank 1: pp1 dp0 cp0"} <= set(texts)


def test_nothing_is_recorded_outside_a_recording() -> None:
    recorder = Recorder(torch.device("cpu"))
    with span("forward", 0, 0):
        pass
    with recording(recorder), span("forward", 0, 1):
        pass
    with span("forward", 0, 2):
        pass
    assert [s.micro_batch for s in recorder.spans()] == [1]
    assert span("forward", 0, 0) is timeline._nothing


def test_time_inside_counts_for_the_inner_span_alone() -> None:
    spans = [
        Span("forward", 0, 0, 0.0, 4.0),
        Span("push", 0, 0, 1.0, 2.0),
        Span("receive", 0, 1, 4.0, 7.0),
        Span("forward", 0, 1, 7.0, 8.0),
    ]
    assert seconds_by_kind(spans) == {"forward": 4.0, "push": 1.0, "receive": 3.0}


def test_a_recording_without_spans_can_be_drawn() -> None:
    ElementTree.fromstring(picture("a < b", [[], []], ["rank 0", "rank 1"]))


def test_a_step_that_fails_is_not_drawn_and_its_error_is_the_one_seen(tmp_path: Path) -> None:
    path = tmp_path / "step.svg"

    def body(model: ParallelModel, rank: int) -> None:
        with pytest.raises(ZeroDivisionError), model.timeline(path):
            raise ZeroDivisionError

    bound("llama", "eagle3", PLAN, body)
    assert not path.exists()
