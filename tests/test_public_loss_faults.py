"""Faults reported of other trainers in labels, masks and denominators of losses under parallelism."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import spec_compile as sc
from spec_compile import ParallelModel, Plan, lower
from spec_compile.batch import PackedBatch
from spec_compile.errors import PlanError
from spec_compile.lowering import Lowered
from tests.analysis.row_bodies import lower_expression, worst_difference
from tests.models import packed_batch, tiny_llama
from tests.oracle import dense_step
from tests.parallel import run_lowered
from tests.step_cases import assert_gradients, clipped, gradients_of, joined
from tests.test_step_anchors import FAMILIES, TARGETS, check_batches, lowered_for, with_anchors

VOCAB = 53


@functools.cache
def pairs() -> tuple[Any, dict[int, Lowered]]:
    """A target whose layers add nothing: the logits of a row are a table's line of its token."""
    target = tiny_llama(layers=2, hidden=8, vocab=13, heads=2, kv_heads=1)
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
    return target, {cp: lower(target, None, Plan(cp=cp, verify=False)) for cp in (1, 2, 4)}


@pytest.mark.parametrize("lengths", [(8,), (3, 1, 9)])
def test_a32_the_policy_is_scored_on_the_same_pairs_on_any_number_of_ranks(
    lengths: tuple[int, ...],
) -> None:
    target, lowered = pairs()
    batch = packed_batch(lengths, vocab=13)
    with torch.no_grad():
        law = target(input_ids=torch.arange(13)[:, None]).logits[:, 0].log_softmax(-1)
    starts = set(batch.cu_seqlens.tolist())
    ids = batch.tokens.tolist()
    by_pair = [0.0 if t in starts else float(law[ids[t - 1], ids[t]]) for t in range(len(ids))]
    assert len(set(by_pair)) > len(ids) // 2

    def body(model: ParallelModel, rank: int) -> tuple[list[float], float]:
        model.step(batch, clipped)
        return model.logprobs(batch).tolist(), model.clip_grad_norm_()["policy"]

    found = {cp: run_lowered(one, target, None, body)[0] for cp, one in lowered.items()}
    for logprobs, norm in found.values():
        assert logprobs == pytest.approx(by_pair, rel=1e-12)
        assert norm == pytest.approx(found[1][1], rel=1e-12)
        assert norm > 0


def labels(i: sc.DraftInputs) -> Tensor:
    """Labels as transformers moves them: padded behind, cut in front, -100 where there is none."""
    kept = torch.where(i.loss_mask, i.tokens % 8, -100)
    return F.pad(kept, (0, 1), value=-100)[1:]


def test_a40_losses_with_the_shift_inside_the_model_are_those_of_one_device() -> None:
    def body(m: Any, i: sc.DraftInputs, h: Tensor) -> sc.DraftOutput:
        options: list[dict[str, Any]] = [
            {}, {"label_smoothing": 0.1}, {"weight": torch.arange(8, dtype=h.dtype)}
        ]  # fmt: skip
        losses = [F.cross_entropy(h, labels(i), reduction="sum", **o) for o in options]
        return sc.DraftOutput(torch.stack(losses), i.loss_mask.sum().expand(3))

    assert worst_difference(body, cp=2, lengths=(8,)) < 1e-12


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"label_smoothing": 0.1}, marks=pytest.mark.slow),
        pytest.param({"weight": torch.ones(8)}, marks=pytest.mark.slow),
    ],
    ids=["plain", "smoothed", "weighted"],
)
def test_a40_a_mean_over_the_rows_of_a_rank_is_refused(options: dict[str, Any]) -> None:
    def body(m: Any, i: sc.DraftInputs, h: Tensor) -> sc.DraftOutput:
        loss = F.cross_entropy(h.float(), labels(i), **options)
        return sc.DraftOutput(loss, i.loss_mask.sum())

    with pytest.raises(PlanError, match=r"test_public_loss_faults\.py:\d+ in body.*\n.*averages"):
        lower_expression(body)


def families(test: Any) -> Any:
    """Run a slow test with every draft of the library."""
    names = [name for name in FAMILIES if "dropping" not in name]
    return pytest.mark.slow(pytest.mark.parametrize("family", names)(test))


@families
def test_a34_a35_a_step_without_a_target_is_zero_and_the_next_gradient_has_its_full_size(
    family: str,
) -> None:
    draft, lowered = lowered_for(family, "qwen3", 2, 1)
    normal = packed_batch((9, 5, 14), vocab=VOCAB)
    nothing = packed_batch((9, 5, 14), vocab=VOCAB)
    nothing.loss_mask = torch.zeros_like(nothing.loss_mask)
    wanted = dense_step(TARGETS["qwen3"], draft, with_anchors(normal, draft, VOCAB, 0), clipped)
    norm = float(torch.stack([g.norm() for g in wanted.draft_grads.values()]).norm())

    def body(model: ParallelModel, rank: int) -> Any:
        empty = model.step(nothing, clipped)
        assert (empty.policy_loss, empty.draft_loss) == (0.0, 0.0)
        assert not any(g is not None and bool(g.any()) for g in gradients_of(model).values())
        norms = model.clip_grad_norm_()
        assert norms == {"policy": 0.0, "draft": 0.0}
        found = model.step(normal, clipped)
        assert found.draft_loss == pytest.approx(wanted.draft_loss, rel=1e-10)
        assert model.clip_grad_norm_()["draft"] == pytest.approx(norm, rel=1e-9)
        return gradients_of(model)

    assert_gradients(run_lowered(lowered, TARGETS["qwen3"], draft, body), joined(wanted))


@families
def test_a36_a_micro_batch_without_a_target_adds_nothing_wherever_it_stands(family: str) -> None:
    """Three micro-batches, one of which has rows and no target; then a replica without any row beside them."""
    batch = packed_batch((12, 12, 12), vocab=VOCAB)
    batch.loss_mask = torch.arange(36) // 12 != 1
    check_batches(family, [batch], cp=2, micro_batches=3, policy_loss=clipped)
    empty = packed_batch((), vocab=VOCAB)
    check_batches(family, [batch, empty], cp=2, micro_batches=3, policy_loss=clipped)


@families
def test_a37_tokens_weigh_the_same_however_they_are_dealt(family: str) -> None:
    """Three targets in one micro-batch and 41 in the other, or all in one."""
    batch: PackedBatch = packed_batch((42, 42), vocab=VOCAB)
    batch.loss_mask = torch.arange(84) >= 81
    batch.loss_mask[1:42] = True
    one, two = (
        check_batches(family, [batch], cp=2, micro_batches=m, policy_loss=clipped)[0]
        for m in (1, 2)
    )
    assert one == two > 0
