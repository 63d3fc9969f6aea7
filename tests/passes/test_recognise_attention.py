"""Attention in PyTorch's own spelling is the declared operator where its mask says so, and refused where not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from spec_compile import DraftInputs, DraftOutput, Lowered, Plan, lower
from spec_compile.errors import PlanError
from tests.models import packed_batch, randomise, tiny_qwen3
from tests.oracle import dense_step
from tests.parallel import run_lowered
from tests.spelled_drafts import (
    SPELLINGS,
    RowByRow,
    SpelledBlocks,
    SpelledSteps,
    joined_eyes,
    repeated,
    window,
)
from tests.step_cases import assert_gradients, gradients_of, joined, lowered_for

VOCAB, DIM = 61, 32
LENGTHS = (7, 21, 1, 16, 0, 3)
ANCHORS = torch.tensor([0, 3, 6, 7, 9, 15, 16, 27, 28, 29, 44, 46, -1, -1])
QUICK = ("joined eyes", "shifted diagonal")


def target() -> Any:
    return tiny_qwen3(layers=3, vocab=VOCAB, hidden=DIM)


def spelled(mask: Any, **options: Any) -> SpelledSteps:
    return randomise(SpelledSteps(DIM, VOCAB, mask, **options).double(), 3)


def of_draft(lowered: Lowered) -> list[Any]:
    return [fact for fact in lowered.facts.attentions if "draft" in fact.owner]


def check_step(
    draft: nn.Module,
    lowered: Lowered,
    body: Callable[[DraftInputs], DraftOutput] | None = None,
    anchors: Tensor | None = None,
    tolerance: float = 1e-9,
) -> None:
    """A step equals the eager draft's, in its own spelling, on one device."""
    model, batch = target(), packed_batch(LENGTHS, vocab=VOCAB, seed=4)
    batch.anchors = anchors
    wanted = dense_step(model, draft, batch, None, draft_body=body)

    def step(parallel: Any, rank: int) -> Any:
        result = parallel.step(batch, None)
        return result.draft_loss, gradients_of(parallel)

    outcomes = run_lowered(lowered, model, draft, step)
    for loss, _ in outcomes:
        assert loss == pytest.approx(wanted.draft_loss, rel=tolerance)
    names = {n: g for n, g in joined(wanted).items() if n.startswith("draft.")}
    found = [{n: g for n, g in grads.items() if n.startswith("draft.")} for _, grads in outcomes]
    assert_gradients(found, names, tolerance=tolerance)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in SPELLINGS]
)
def test_a_spelled_draft_steps_like_the_eager_one(name: str) -> None:
    draft = spelled(SPELLINGS[name])
    lowered = lower(target(), draft, Plan(cp=2))
    facts = of_draft(lowered)
    assert [fact.branches for fact in facts] == [(), ("diagonal",), ("diagonal", "diagonal")]
    assert {fact.window for fact in facts} == {5 if name == "window" else None}
    assert {fact.heads for fact in facts} == {(4, 2)}
    assert "recognised as: main keys s < index + 1 of the document" in lowered.explain()
    eager = copy.deepcopy(draft)
    eager.mask = joined_eyes if name == "flex" else eager.mask  # flex has no backward on CPU
    eager.load_state_dict(draft.state_dict())
    check_step(draft, lowered, functional(eager, draft))


def functional(eager: nn.Module, draft: nn.Module) -> Callable[[DraftInputs], DraftOutput]:
    """A second module that computes with a draft's own parameters."""
    return lambda inputs: torch.func.functional_call(
        eager, dict(draft.named_parameters()), (inputs,)
    )


def test_a_draft_in_the_declared_form_is_left_alone() -> None:
    *_, lowered = lowered_for("qwen3", "eagle3", Plan(cp=2, verify=False))
    assert [r.changes for r in lowered.history if r.name == "RecogniseAttention"] == [0]
    assert not lowered.facts.notes


@pytest.mark.parametrize(
    "used", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["own block", "own used block"]
)
def test_a_spelled_block_draft_steps_like_the_eager_one(used: bool) -> None:
    draft = randomise(SpelledBlocks(DIM, VOCAB, used=used).double(), 3)
    lowered = lower(target(), draft, Plan(cp=2))
    assert [fact.branches for fact in of_draft(lowered)] == [("block",), ("block",)]
    check_step(draft, lowered, anchors=ANCHORS)


@pytest.mark.parametrize("used", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_block_that_is_causal_inside_is_one_branch_a_slot(used: bool) -> None:
    draft = randomise(SpelledBlocks(DIM, VOCAB, layers=1, used=used, causal=True).double(), 3)
    lowered = lower(target(), draft, Plan(cp=2))
    assert [fact.branches for fact in of_draft(lowered)] == [("block",) * 3]
    assert "block, causal inside" in lowered.explain()
    check_step(draft, lowered, anchors=ANCHORS)


@pytest.mark.slow
def test_a_causal_block_steps_on_four_ranks_of_two_stages() -> None:
    draft = randomise(SpelledBlocks(DIM, VOCAB, causal=True).double(), 3)
    check_step(draft, lower(target(), draft, Plan(cp=2, pp=2, micro_batches=2)), anchors=ANCHORS)


@pytest.mark.parametrize(
    "limit",
    [
        {"micro_batches": 2},
        pytest.param({"max_tokens_per_micro_batch": 99}, marks=pytest.mark.slow),
    ],
)
def test_a_mask_without_documents_is_refused_where_documents_are_dealt(limit: Any) -> None:
    draft = spelled(lambda inputs, step: None, steps=1, is_causal=True)
    with pytest.raises(PlanError, match="how documents are dealt to micro-batches") as caught:
        lower(target(), draft, Plan(cp=2, verify=False, **limit))
    assert "spelled_drafts.py:" in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("gqa", ["interleave", "enable"])
def test_repeated_heads_are_read_unrepeated(gqa: str) -> None:
    draft = spelled(joined_eyes, steps=2, gqa=gqa)
    lowered = lower(target(), draft, Plan(cp=2))
    assert {fact.heads for fact in of_draft(lowered)} == {(4, 2)}
    check_step(draft, lowered)


class OneColumn(SpelledSteps):
    """Values that repeat one column, copied together with the heads."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        rows = v.shape[2]
        first = v[..., :1][:, :, None].expand(1, 2, 2, rows, 8).reshape(1, 4, rows, 8)
        return nn.functional.scaled_dot_product_attention(q, repeated(k), first, attn_mask=mask)


@pytest.mark.slow
def test_copies_along_another_dimension_are_kept() -> None:
    draft = randomise(OneColumn(DIM, VOCAB, joined_eyes, steps=1).double(), 3)
    check_step(draft, lower(target(), draft, Plan(cp=2)))


@pytest.mark.slow
def test_is_causal_is_causal_over_the_whole_row() -> None:
    draft = spelled(lambda inputs, step: None, steps=1, is_causal=True)
    lowered = lower(target(), draft, Plan(cp=2))
    assert any(
        note.endswith("s < index + 1 of every document in the packed row")
        for note in lowered.facts.notes
    )
    check_step(draft, lowered)


@pytest.mark.slow
def test_a_window_beyond_any_small_batch_keeps_its_size() -> None:
    lowered = lower(target(), spelled(window(3000), steps=1), Plan(cp=2, verify=False))
    assert [fact.window for fact in of_draft(lowered)] == [3000]


HELD = torch.tensor(300)
FAR: dict[str, Callable[[Tensor], Tensor]] = {
    "float": lambda away: away > 600 / 2,
    "divided": lambda away: away / 2 > 150.0,
    "tensor": lambda away: away > HELD,
    "filled": lambda away: torch.full((1, 1), 300.0) < away,
}


@pytest.mark.parametrize(
    "name", ["float", *[pytest.param(n, marks=pytest.mark.slow) for n in FAR if n != "float"]]
)
def test_a_window_counts_however_its_size_is_written(name: str) -> None:
    def windowed(inputs: DraftInputs, step: int) -> Tensor:
        far = FAR[name](inputs.index[:, None] - inputs.index[None])
        return joined_eyes(inputs, step) & ~far

    if name == "divided":
        with pytest.raises(PlanError, match="depends on the size of its constants"):
            lower(target(), spelled(windowed, steps=1), Plan(cp=2, verify=False))
        return
    lowered = lower(target(), spelled(windowed, steps=1), Plan(cp=2, verify=False))
    assert [fact.window for fact in of_draft(lowered)] == [301]


def rounded(inputs: DraftInputs, step: int) -> Tensor:
    row = inputs.index.bfloat16()
    return joined_eyes(inputs, step) & (row[None] <= row[:, None] - 0.0)


def one_row_by_product(inputs: DraftInputs, step: int) -> Tensor:
    return joined_eyes(inputs, step) & (inputs.index[None] * 3 != 300)


def small_factor(inputs: DraftInputs, step: int) -> Tensor:
    near = (inputs.index[:, None] - inputs.index[None]).double() * 1e-3 < 0.3
    return joined_eyes(inputs, step) & near


def shifted_diagonal(inputs: DraftInputs, step: int) -> Tensor:
    return joined_eyes(inputs, step).roll(1, 1) if step else joined_eyes(inputs, step)


def biased(inputs: DraftInputs, step: int) -> Tensor:
    return -0.5 * (inputs.index[:, None] - inputs.index[None]).abs().double()


def by_token(inputs: DraftInputs, step: int) -> Tensor:
    return inputs.tokens[None] != 0 & joined_eyes(inputs, 0)


def one_key_too_few_far_out(inputs: DraftInputs, step: int) -> Tensor:
    last = (inputs.index[None] >= 299) & (inputs.index[None] < 300)
    late = (inputs.index[:, None] >= 300) & last
    return joined_eyes(inputs, 0) & ~late


def only_of_long_rows(inputs: DraftInputs, step: int) -> Tensor:
    return joined_eyes(inputs, 0) & (torch.full_like(inputs.index, inputs.index.shape[0]) < 200)


def one_key_too_few_by_division(inputs: DraftInputs, step: int) -> Tensor:
    late = (inputs.index[:, None] // 9 // 9 == 1) & (inputs.index[None] == 0)
    return joined_eyes(inputs, 0) & ~late


WRONG = {
    "division": (one_key_too_few_by_division, 1, "another form"),
    "shifted diagonal": (shifted_diagonal, 2, "another form than branch_attention's"),
    "bias": (biased, 1, "adds a bias to its scores"),
    "tokens": (by_token, 1, "depends on tokens"),
    "far out": (one_key_too_few_far_out, 1, "another form"),
    "rounded": (rounded, 1, "numbers of rows in torch.bfloat16"),
    "product": (one_row_by_product, 1, "with a number above 64"),
    "small factor": (small_factor, 1, "too far to try"),
    "long rows": (only_of_long_rows, 1, "another form"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in WRONG]
)
def test_another_mask_is_refused_with_its_line(name: str) -> None:
    mask, steps, message = WRONG[name]
    with pytest.raises(PlanError, match=message) as caught:
        lower(target(), spelled(mask, steps=steps), Plan(cp=2, verify=False))
    assert "spelled_drafts.py:" in str(caught.value)
    advised = "write sc.branch_attention(" in str(caught.value)
    assert advised == ("bias" not in message), "what the declared form has not, it is no advice for"


@pytest.mark.slow
def test_depths_joined_row_by_row_are_refused_by_name() -> None:
    draft = randomise(RowByRow(DIM, VOCAB, joined_eyes, steps=1).double(), 3)
    with pytest.raises(PlanError, match="join the rows of several depths depth by depth") as caught:
        lower(target(), draft, Plan(cp=2, verify=False))
    assert "spelled_drafts.py:" in str(caught.value)


@pytest.mark.slow
def test_a_recognised_draft_runs_on_four_ranks_of_two_stages() -> None:
    draft = spelled(joined_eyes, steps=2)
    check_step(draft, lower(target(), draft, Plan(cp=2, pp=2, micro_batches=2)))


def attends(call: Callable[[Tensor, DraftInputs], Tensor]) -> nn.Module:
    """A draft of one attention over the tapped rows, in the given spelling."""

    class Attends(nn.Module):
        taps = (1,)

        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(DIM, VOCAB, dtype=torch.float64)

        def forward(self, inputs: DraftInputs) -> DraftOutput:
            x = inputs.features.unflatten(-1, (4, -1)).transpose(0, 1)[None]
            mixed = call(x, inputs)[0].transpose(0, 1).flatten(1)
            loss = self.head(mixed).logsumexp(-1) * inputs.loss_mask
            return DraftOutput(loss.sum(), inputs.loss_mask.sum())

    return Attends()


@pytest.mark.parametrize("attend", [flex_attention, torch.compile(flex_attention)])
def test_flex_attention_across_documents_is_warned_of_once_and_noted_under_its_name(
    attend: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(globals(), "flex_attention", attend)

    def causal(x: Tensor, inputs: DraftInputs) -> Any:
        rows = x.shape[2]
        mask = create_block_mask(lambda b, h, q, k: k <= q, None, None, rows, rows)
        return flex_attention(x, x, x, block_mask=mask)

    (note,) = lower(target(), attends(causal), Plan(verify=False)).facts.notes
    assert note.startswith("flex_attention (")
    assert "of every document" in note
    told = [r.getMessage() for r in caplog.records if "across documents" in r.getMessage()]
    assert len(told) == 1
    assert "test_recognise_attention.py:" in told[0]


def plain(x: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, mask, **options)


UNSUPPORTED: dict[str, tuple[Callable[[Tensor, DraftInputs], Any], str]] = {
    "ALiBi": (lambda x, inputs: plain(x, biased(inputs, 0)), "no spelling has biases"),
    "score_mod": (lambda x, _: flex_attention(x, x, x, score_mod=lambda s, *_: s), "no biases"),
    "heads": (lambda x, inputs: by_head(x, inputs), "reads the head"),
    "dropout": (lambda x, _: plain(x, is_causal=True, dropout_p=0.1), "dropout_p=0.0"),
    "modulo": (lambda x, inputs: plain(x, every_third(inputs)), "every n-th key, no spelling has"),
}


def by_head(x: Tensor, inputs: DraftInputs) -> Tensor:
    """One head sees all rows in front, the others two; FlexAttention does so with H=None too."""
    document = inputs.document

    def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (document[q] == document[k]) & ((h == 0) | (q - k < 2))

    rows = x.shape[-2]
    return flex_attention(x, x, x, block_mask=create_block_mask(seen, None, None, rows, rows))


def every_third(inputs: DraftInputs) -> Tensor:
    return joined_eyes(inputs, 0) & ((inputs.index[:, None] - inputs.index[None]) % 3 == 0)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.slow if n in ("modulo", "dropout") else ())
        for n in UNSUPPORTED
    ],
)
def test_what_no_spelling_has_is_said_so(name: str) -> None:
    call, match = UNSUPPORTED[name]
    with pytest.raises(PlanError, match=match):
        lower(target(), attends(call), Plan(verify=False))
