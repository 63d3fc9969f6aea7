"""Faults reported of other compilers of attention: calls that they miss, operands that are shared, other lengths."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.functional import scaled_dot_product_attention as renamed

import spec_compile as sc
from spec_compile import ParallelModel, Plan, lower
from spec_compile.drafts import Eagle3
from spec_compile.errors import PlanError
from spec_compile.lowering import Lowered
from tests.analysis import row_bodies
from tests.analysis.row_bodies import Expression, draft_of, lower_expression, worst_difference
from tests.models import packed_batch, randomise, tiny_llama
from tests.oracle import dense_step
from tests.parallel import run_lowered
from tests.passes.test_recognise_attention import check_step, functional, spelled, target
from tests.spelled_drafts import joined_eyes
from tests.step_cases import assert_gradients, gradients_of, joined


def causal(i: sc.DraftInputs) -> Tensor:
    return (i.index[None] <= i.index[:, None]) & (i.document[None] == i.document[:, None])


def test_a21_attention_under_another_name_is_found() -> None:
    def body(m: Any, i: sc.DraftInputs, h: Tensor) -> Tensor:
        q, k, v = h[None, None], h[None, None, :, :], h[None, None, :, :3]
        mixed: Tensor = renamed(q, k, v, attn_mask=causal(i))[0, 0]
        return mixed

    assert worst_difference(body, cp=2) < 1e-9


def by_hand(m: Any, i: sc.DraftInputs, h: Tensor) -> Tensor:
    scores = (h @ h.T).masked_fill(~causal(i), -torch.inf)
    return scores.softmax(-1) @ h


def by_einsum(m: Any, i: sc.DraftInputs, h: Tensor) -> Tensor:
    scores = torch.einsum("td,sd->ts", h, h).masked_fill(~causal(i), -1e30)
    return torch.einsum("ts,sd->td", scores.softmax(-1), h)


@pytest.mark.parametrize("body", [by_hand, pytest.param(by_einsum, marks=pytest.mark.slow)])
def test_a21_attention_spelled_by_hand_is_refused_with_its_line(body: Expression) -> None:
    with pytest.raises(PlanError, match=rf"test_public_attention_faults\.py:\d+ in {body.__name__}"):  # fmt: skip
        lower_expression(body)


def blocked(inputs: sc.DraftInputs, step: int) -> Any:
    """FlexAttention's mask in blocks of 256 rows and 128 keys."""
    total, document = inputs.tokens.shape[0], inputs.document

    def visible(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        own = (k - q) % total == 0
        return torch.where(k < total, (k <= q) & (document[k % total] == document[q]), own)

    keys = (step + 1) * total
    return create_block_mask(visible, None, None, total, keys, "cpu", BLOCK_SIZE=(256, 128))


@pytest.mark.slow
def test_a27_the_block_size_of_a_users_mask_changes_nothing() -> None:
    draft = spelled(blocked, steps=2)
    lowered = lower(target(), draft, Plan(cp=2))
    eager = spelled(joined_eyes, steps=2)  # flex has no backward on CPU
    check_step(draft, lowered, functional(eager, draft))


def shared(m: Any, i: sc.DraftInputs, h: Tensor) -> Tensor:
    """Queries of two calls; keys of both calls, of a branch, of a shift, and of the loss itself."""
    q, k, v = h.view(-1, 2, 4), (h * 0.5)[:, None, :4], (h + 1)[:, None, 4:]
    where: dict[str, Tensor] = {"q_document": i.document, "k_document": i.document}
    one = sc.branch_attention(q, k, v, q_limit=i.index + 1, **where)  # type: ignore[arg-type]
    own = [(k, v, i.index, i.index)]
    two = sc.branch_attention(q, k, v, own, q_limit=i.index, **where)  # type: ignore[arg-type]
    moved = sc.shift(k.flatten(1), 1, i.document)
    return torch.cat([one.flatten(1), two.flatten(1), k.flatten(1), moved, q.flatten(1)], 1)


def test_a43_operands_shared_by_two_attentions_keep_their_other_uses() -> None:
    assert worst_difference(shared, cp=2) < 1e-9
    plan = Plan(cp=2, cp_strategy="all_gather", verify=False)
    (gm,) = lower(row_bodies.TARGET, draft_of(shared), plan).graphs.values()
    calls = [n for n in gm.graph.nodes if "context_attention" in str(n.target)][-2:]
    # both read one gathered pair, and their own rows' queries
    assert calls[0].args[1:3] == calls[1].args[1:3]
    assert calls[0].args[0] == calls[1].args[0]
    before = Counter(str(n.target) for n in gm.graph.nodes)
    gm.graph.eliminate_dead_code()
    assert Counter(str(n.target) for n in gm.graph.nodes) == before


@functools.cache
def eagle() -> tuple[Any, Eagle3, Lowered]:
    made = tiny_llama(layers=2, hidden=8, vocab=13, heads=2, kv_heads=1)
    draft = randomise(Eagle3.from_target(made, 2), 3)
    return made, draft, lower(made, draft, Plan(cp=2, verify=False))


def test_a19_a_model_goes_on_to_longer_and_shorter_rows_with_the_gradients_of_a_fresh_one() -> None:
    made, draft, lowered = eagle()
    rows = [(100,), (130, 99), (99,)]
    given = [packed_batch(lengths, vocab=13) for lengths in rows]
    wanted = [dense_step(made, draft, batch, None) for batch in given]

    def body(model: ParallelModel, rank: int) -> list[Any]:
        found = []
        for batch in given:
            loss = model.step(batch, None).draft_loss
            found.append((loss, gradients_of(model)))
            assert model.draft is not None
            model.draft.zero_grad()
        return found

    outcomes = run_lowered(lowered, made, draft, body)
    for at, want in enumerate(wanted):
        assert all(o[at][0] == pytest.approx(want.draft_loss, rel=1e-10) for o in outcomes)
        assert_gradients([o[at][1] for o in outcomes], joined(want))


def test_a20_a_row_that_only_fills_a_rank_reaches_no_shared_weight() -> None:
    made, draft, lowered = eagle()
    batch = packed_batch((63,), vocab=13)
    batch.loss_mask[-1] = False
    wanted = dense_step(made, draft, batch, None)

    def body(model: ParallelModel, rank: int) -> dict[str, Tensor | None]:
        model.step(batch, None)
        return gradients_of(model)

    found = run_lowered(lowered, made, draft, body)
    for grads in found:
        assert all(bool(g.isfinite().all()) for g in grads.values() if g is not None)
    assert_gradients(found, joined(wanted))
