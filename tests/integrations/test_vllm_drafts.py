"""Drafts that vLLM has no code for, or other code, are refused before it starts."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from spec_compile.drafts import MTP, DFlash, DSpark, Eagle3, PEagle
from spec_compile.errors import ConfigError
from spec_compile.integrations.vllm_drafts import METHODS, check_served
from tests.models import gated_draft, tiny_llama

REFUSED: list[tuple[Any, int, str]] = [
    (lambda t: MTP.from_target(t, 2), 2, "expected an Eagle3, PEagle, DFlash or DSpark, found MTP"),
    (lambda t: gated_draft(t), 2, "family of drafts: expected an Eagle3, .*; sc.Engine serves it"),
    (lambda t: Eagle3.from_target(t, 2, taps=(2, 1, 3)), 2, r"reads \(2, 1, 3\)"),
    (lambda t: DFlash.from_target(t, 4, taps=(1,), qk_norm=False), 3, "qk_norm=True, found False"),
    (lambda t: DFlash.from_target(t, 4, taps=(1,), sample_from_anchor=True), 3, "found True"),
    (lambda t: DFlash.from_target(t, 4, taps=(1,)), 4, "=4 is more than the 3 tokens"),
    (
        lambda t: DSpark.from_target(t, 3, taps=(1,), markov_rank=4, markov_head_type="rnn"),
        3,
        "markov_head_type='vanilla', found 'rnn'; sc.Engine serves it",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("make", "number", "message"), REFUSED, ids=[m for *_, m in REFUSED])
def test_draft_that_vllm_would_run_otherwise_is_refused(
    make: Any, number: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_served(make(tiny_llama()), number)


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("eagle3", lambda t: Eagle3.from_target(t, 2, taps=(1, 2, 3))),
        ("peagle", lambda t: PEagle.from_target(t, 4, taps=(1, 2))),
        ("dflash", lambda t: DFlash.from_target(t, 4, taps=(1, 2))),
        ("dspark", lambda t: DSpark.from_target(t, 3, taps=(1,), sample_from_anchor=False)),
    ],
)
def test_draft_that_vllm_runs_as_it_was_trained_is_taken(
    kind: str, make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    draft = make(tiny_llama())
    assert check_served(draft, 2 if kind == "dspark" else 3) == kind
    assert kind in METHODS
    assert not caplog.records


def test_blocks_that_vllm_reads_in_another_way_are_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sliding: dict[str, Any] = {
        "layer_types": ("sliding_attention",),
        "sliding_window": 4,
        "num_hidden_layers": 1,
    }
    with caplog.at_level(logging.WARNING):
        check_served(DFlash.from_target(tiny_llama(), 4, taps=(1,), **sliding), 2)
    shorter, moved = (record.getMessage() for record in caplog.records)
    assert "with 2 of its 3 tokens" in shorter
    assert "window of sliding layers" in moved
