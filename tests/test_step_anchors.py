"""Drafts that read anchors: whole steps equal the dense one, and what looks elsewhere is refused."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spec_compile as sc
from spec_compile import ParallelModel, Plan, lower
from spec_compile.batch import PackedBatch
from spec_compile.checked_batch import check_batch
from spec_compile.drafts import MTP, DFlash, DSpark, Eagle3, PEagle
from spec_compile.errors import PlanError
from spec_compile.lowering import Lowered
from spec_compile.runtime.anchors import AnchorRule, draw_anchors
from tests.models import packed_batch, randomise, tiny_llama, tiny_qwen3
from tests.oracle import dense_step
from tests.parallel import run_lowered
from tests.step_cases import assert_gradients, clipped, gradients_of, joined

TARGETS = {
    "tiny": tiny_llama(layers=2, hidden=8, vocab=13, heads=2, kv_heads=1),
    "qwen3": tiny_qwen3(layers=3, vocab=53),
}
UNFRIENDLY = (7, 21, 1, 35, 0, 3)
GIVEN = (0, 1, 6, 7, 19, 27, 28, 29, 50, 63, 64, 66, -1)
B = 3
KNOWN = torch.arange(1, 53, 3)
"""Ids of reduced vocabularies."""


class Draft(nn.Module):
    """A few weights around any body that reads anchors."""

    taps = (0, 1)
    block_size, anchors_per_document = B, 4

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.w = nn.Parameter(torch.zeros(8, 16))
        self.mask = nn.Parameter(torch.zeros(B, 8))

    def forward(self, inputs: sc.DraftInputs) -> sc.DraftOutput:
        assert inputs.anchors is not None
        h = F.linear(inputs.features, self.w)
        slots = inputs.anchors[:, None] + torch.arange(B)
        rows = slots.clamp(0, h.shape[0] - 1)
        used = (inputs.anchors >= 0)[:, None].expand(-1, B)
        x = BODIES[self.name](inputs, h, h[rows] + self.mask, rows)
        keep = used & (slots < h.shape[0])
        keep = keep & (inputs.document[rows] == inputs.document[rows[:, :1]])
        values = x.reshape(-1, B, 8).square().sum(-1) * inputs.tokens[rows]
        return sc.DraftOutput(torch.where(keep, values, 0.0).sum(0), keep.sum(0))


def attend(
    inputs: sc.DraftInputs, h: Tensor, x: Tensor, group: Tensor, window: int | None = None
) -> Tensor:
    """Blocks see rows in front of their anchor, and slots of the same group."""
    anchors = inputs.anchors
    assert anchors is not None
    document = inputs.document[anchors.clamp_min(0)].repeat_interleave(B)
    q, k = x.reshape(-1, 2, 4), h[:, None, :4]
    mixed = sc.branch_attention(
        q,
        k,
        k + 1,
        [(q[:, :1] * 0.5, q[:, 1:] - 1, group, group)],
        q_limit=anchors.repeat_interleave(B),
        q_document=document,
        k_document=inputs.document,
        window=window,
    )
    return mixed.reshape(-1, B, 8)


def by_anchor(inputs: sc.DraftInputs, h: Tensor, x: Tensor, rows: Tensor) -> Tensor:
    assert inputs.anchors is not None
    return attend(inputs, h, x, inputs.anchors[:, None].expand(-1, B).reshape(-1), window=4)


def by_document(inputs: sc.DraftInputs, h: Tensor, x: Tensor, rows: Tensor) -> Tensor:
    """Keys that all blocks of a document share; unused anchors are in no document."""
    assert inputs.anchors is not None
    document = inputs.document[rows[:, 0]]
    return attend(inputs, h, x, torch.where(inputs.anchors >= 0, document, -1).repeat_interleave(B))


def rows_see_blocks(inputs: sc.DraftInputs, h: Tensor, x: Tensor, rows: Tensor) -> Tensor:
    """Queries at every row, keys at the slots, read back at the anchors."""
    assert inputs.anchors is not None
    group = torch.where(inputs.anchors >= 0, inputs.document[rows[:, 0]], -1).repeat_interleave(B)
    k = x.reshape(-1, 1, 8)[..., :4]
    mixed = sc.branch_attention(
        h.view(-1, 2, 4),
        h[:, None, 4:],
        h[:, None, :4],
        [(k, k * 2, group, inputs.document)],
        q_limit=inputs.index,
        q_document=inputs.document,
        k_document=inputs.document,
    )
    return x + mixed.flatten(1)[rows]


def spellings(inputs: sc.DraftInputs, h: Tensor, x: Tensor, rows: Tensor) -> Tensor:
    """Gathers in every spelling, of values of several dimensions and types."""
    first, flat = rows[:, 0], rows.flatten()
    y = x + h.index_select(0, flat).view(-1, B, 8) + h[first][:, None]
    y = y + h.view(-1, 2, 4)[rows].flatten(2) * inputs.loss_mask[rows][..., None]
    y = y + inputs.positions.gather(0, flat).view(-1, B, 1) + h[(first - 1)][:, None]
    y = y + h.sin().sum(-1).gather(0, flat).unflatten(0, (-1, B))[..., None]
    z = h[first][:, None].cos().expand(-1, B, -1).flatten(0, 1)
    y = y + z.view(-1, B, 8) + inputs.embedding(inputs.tokens[rows] % 5)
    assert isinstance(y, Tensor)
    return y


def sums(inputs: sc.DraftInputs, h: Tensor, x: Tensor, rows: Tensor) -> Tensor:
    """Sums over anchors and over rows beside one another."""
    assert inputs.anchors is not None
    used = (inputs.anchors >= 0)[:, None, None]
    total = torch.where(used, x, 0.0).sum((0, 1)) + 0.1 * h.sum(0)
    return x * total.sin() + (inputs.anchors >= 0).sum() / inputs.tokens.shape[0]


BODIES: dict[str, Callable[[sc.DraftInputs, Tensor, Tensor, Tensor], Tensor]] = {
    "blocks by number": lambda i, h, x, rows: attend(
        i, h, x, torch.arange(x.shape[0]).repeat_interleave(B)
    ),
    "blocks by anchor": by_anchor,
    "blocks of a document": by_document,
    "rows see blocks": rows_see_blocks,
    "spellings": spellings,
    "sums": sums,
}


def drafted(name: str) -> nn.Module:
    made: dict[str, Callable[[Any], nn.Module]] = {
        "eagle3": lambda t: Eagle3.from_target(t, 3),
        "mtp": lambda t: MTP.from_target(t, 3),
        "peagle": lambda t: PEagle.from_target(t, 3, num_hidden_layers=2),
        "peagle dropping depths": lambda t: PEagle.from_target(
            t, 3, num_hidden_layers=2, anchors_per_document=4
        ),
        "dflash": lambda t: DFlash.from_target(t, 4, num_hidden_layers=2, anchors_per_document=5),
        "dspark": lambda t: DSpark.from_target(
            t, 4, num_hidden_layers=2, anchors_per_document=5, markov_rank=6
        ),
        "eagle3 of two layers": lambda t: Eagle3.from_target(
            t, 2, num_hidden_layers=2, layer_types=("full_attention", "sliding_attention"),
            sliding_window=5, draft_vocab=KNOWN,
        ),
        "dflash reduced": lambda t: DFlash.from_target(
            t, 3, num_hidden_layers=1, anchors_per_document=5, draft_vocab=KNOWN
        ),
        "dflash reduced by kl": lambda t: DFlash.from_target(
            t, 3, num_hidden_layers=1, anchors_per_document=5, draft_vocab=KNOWN, loss_type="kl"
        ),
        "dspark reduced": lambda t: DSpark.from_target(
            t, 3, num_hidden_layers=1, anchors_per_document=5, markov_rank=6, draft_vocab=KNOWN
        ),
        "dspark reduced by its law": lambda t: DSpark.from_target(
            t, 3, num_hidden_layers=1, anchors_per_document=5, markov_rank=6, draft_vocab=KNOWN,
            teacher_law="draft", markov_head_type="rnn",
        ),
    }  # fmt: skip
    if name in made:
        return randomise(made[name](TARGETS["qwen3"]), 1)
    return randomise(Draft(name).double(), 1)


@functools.lru_cache(maxsize=64)
def lowered_for(
    name: str, target: str, cp: int, pp: int, strategy: str = "auto"
) -> tuple[nn.Module, Lowered]:
    draft = drafted(name)
    return draft, lower(TARGETS[target], draft, Plan(cp=cp, pp=pp, cp_strategy=strategy))


def check(
    name: str,
    lengths: tuple[int, ...] = UNFRIENDLY,
    *,
    anchors: tuple[int, ...] | None = None,
    dp: int = 1,
    **options: Any,
) -> None:
    """A step on random batches equals the dense step, to fp64 precision."""
    vocab = TARGETS["tiny" if name in BODIES else "qwen3"].config.vocab_size
    given = [packed_batch(lengths[: len(lengths) - d], vocab=vocab, seed=d) for d in range(dp)]
    for batch in given:
        batch.anchors = None if anchors is None else torch.tensor(anchors)
    check_batches(name, given, **options)


def check_batches(
    name: str,
    given: list[PackedBatch],
    *,
    cp: int = 1,
    pp: int = 1,
    policy_loss: Any = None,
    **plan: Any,
) -> tuple[float, dict[str, Tensor]]:
    """Losses and all gradients are the dense step's; gives the draft loss and the dense gradients."""
    torch.set_num_threads(1)
    target = "tiny" if name in BODIES else "qwen3"
    draft, lowered = lowered_for(name, target, cp, pp, plan.get("cp_strategy", "auto"))
    lowered = dataclasses.replace(lowered, plan=Plan(cp=cp, pp=pp, dp=len(given), **plan))
    vocab = TARGETS[target].config.vocab_size
    dense = [with_anchors(batch, draft, vocab, lowered.plan.seed) for batch in given]
    wanted = dense_step(TARGETS[target], draft, dense, policy_loss)

    def body(model: ParallelModel, rank: int) -> Any:
        result = model.step(given[model.dp_rank], policy_loss)
        return result, gradients_of(model), model.evaluate(given[model.dp_rank])

    outcomes = run_lowered(lowered, TARGETS[target], draft, body)
    for result, _, evaluation in outcomes:
        assert result.policy_loss == pytest.approx(wanted.policy_loss, rel=1e-10, abs=1e-12)
        assert result.draft_loss == pytest.approx(wanted.draft_loss, rel=1e-10, abs=1e-12)
        assert evaluation.draft_loss == pytest.approx(wanted.draft_loss, rel=1e-10, abs=1e-12)
    assert_gradients([grads for _, grads, _ in outcomes], joined(wanted), tolerance=1e-9)
    return wanted.draft_loss, joined(wanted)


def with_anchors(batch: PackedBatch, draft: nn.Module, vocab: int, seed: int) -> PackedBatch:
    """The whole batch with the anchors that are drawn for it, whatever its micro-batches."""
    number: Any = getattr(draft, "anchors_per_document", None)
    if batch.anchors is not None or number is None:
        return batch
    drawn = draw_anchors(check_batch(batch, vocab), AnchorRule(number, seed))
    return dataclasses.replace(batch, anchors=drawn)


LIBRARY = ("mtp", "peagle", "peagle dropping depths", "dflash", "dspark")
FAMILIES = ("eagle3", *LIBRARY)
QUICK = [(1, 2, "mtp"), (3, 1, "peagle")]
"""What every run tries; EAGLE-3's quick sizes are in the matrix of plans, those of blocks are below."""
CELLS = [
    pytest.param(*cell, marks=[] if cell in QUICK else [pytest.mark.slow])
    for cell in itertools.product((1, 2, 3, 4), (1, 2), FAMILIES)
]


@pytest.mark.parametrize(("cp", "pp", "name"), CELLS)
def test_a_step_of_a_library_draft_equals_the_dense_step(name: str, cp: int, pp: int) -> None:
    for micro_batches in (1, 2):
        check(name, cp=cp, pp=pp, micro_batches=micro_batches, policy_loss=clipped)


VARIANTS = [
    *((2, 2, name) for name in ("eagle3 of two layers", "dflash reduced", "dspark reduced")),
    *(pytest.param(2, 2, name, marks=pytest.mark.slow)
      for name in ("dflash reduced by kl", "dspark reduced by its law")),
    *(pytest.param(*size, name, marks=pytest.mark.slow)
      for size in ((1, 2), (4, 1))
      for name in ("eagle3 of two layers", "dflash reduced", "dspark reduced by its law")),
]  # fmt: skip


@pytest.mark.parametrize(("cp", "pp", "name"), VARIANTS)
def test_a_step_of_a_variant_equals_the_dense_step(name: str, cp: int, pp: int) -> None:
    check(name, cp=cp, pp=pp, micro_batches=2, policy_loss=clipped)


@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_given_anchors_are_used_as_they_are(name: str) -> None:
    for micro_batches in (1, 3):
        check(name, cp=3, anchors=GIVEN, micro_batches=micro_batches)


@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_two_data_parallel_ranks_with_different_anchors(name: str) -> None:
    check(name, cp=3, dp=2, micro_batches=2)


def test_policy_gradients_are_the_same_bits_whether_an_anchored_draft_trains() -> None:
    draft, lowered = lowered_for("dflash", "qwen3", 3, 1)
    batch = packed_batch(UNFRIENDLY, vocab=53)

    def body(model: ParallelModel, rank: int) -> list[dict[str, Any]]:
        found = []
        for train_draft in (True, False):
            model.step(batch, clipped, train_draft=train_draft)
            grads = gradients_of(model)
            found.append({k: v for k, v in grads.items() if k.startswith("policy")})
            for part in (model.target, model.draft):
                assert part is not None
                part.zero_grad()
        return found

    for on, off in run_lowered(lowered, TARGETS["qwen3"], draft, body):
        assert on.keys() == off.keys()
        assert all(torch.equal(on[name], off[name]) for name in on)


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize(
    ("cp", "pp"),
    [(3, 1), *(pytest.param(cp, 2, marks=pytest.mark.slow) for cp in (1, 2))],
)
def test_a_step_of_an_own_anchored_draft_equals_the_dense_step(name: str, cp: int, pp: int) -> None:
    check(name, cp=cp, pp=pp, anchors=GIVEN, micro_batches=1)


@pytest.mark.parametrize("cp", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("lengths", [(1,), (0, 1), (3, 2), (4, 0, 3)])
def test_a_step_with_hardly_any_rows_or_anchors_equals_the_dense_step(
    lengths: tuple[int, ...], cp: int
) -> None:
    for micro_batches in (1, 3):
        check("dflash", lengths, cp=cp, micro_batches=micro_batches)


@pytest.mark.parametrize("family", [MTP, PEagle, DFlash, DSpark])
def test_a_draft_of_another_type_than_its_target_is_captured_exactly(family: Any) -> None:
    target = TARGETS["qwen3"]
    draft = randomise(family.from_target(target, dtype=torch.float32, num_hidden_layers=1), 1)
    assert "captured graph equals the eager modules" in lower(target, draft, Plan()).verified


def gathering(index: Callable[[sc.DraftInputs], Tensor]) -> Draft:
    class Gathering(Draft):
        def forward(self, inputs: sc.DraftInputs) -> sc.DraftOutput:
            h = F.linear(inputs.features, self.w)[index(inputs)]
            return sc.DraftOutput(h.square().sum() + self.mask.sum(), torch.tensor(1))

    return Gathering("sums").double()


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        (lambda i: i.anchors + i.tokens[i.anchors], "depends on tokens"),
        (lambda i: i.anchors + i.document[i.anchors], "depends on document"),
        (lambda i: i.tokens, "indexes rows with other rows"),
        (lambda i: i.index.flip(0), "flip"),
        (lambda i: i.anchors + i.anchors.flip(0), "flip"),
        (lambda i: i.anchors + i.features[i.anchors, 0].long(), "index"),
    ],
)
def test_a_gather_at_anything_but_anchors_is_refused_with_its_line(
    index: Callable[[sc.DraftInputs], Tensor], reason: str
) -> None:
    with pytest.raises(PlanError, match=rf"test_step_anchors\.py:\d+ in [\s\S]*{reason}"):
        lower(TARGETS["tiny"], gathering(index), Plan(cp=2))


def test_a_shift_over_slots_of_other_anchors_is_refused() -> None:
    class Shifting(Draft):
        def forward(self, inputs: sc.DraftInputs) -> sc.DraftOutput:
            assert inputs.anchors is not None
            h = F.linear(inputs.features, self.w)[inputs.anchors]
            moved = sc.shift(h, 1, inputs.document[inputs.anchors])
            return sc.DraftOutput(moved.square().sum() + self.mask.sum(), torch.tensor(1))

    with pytest.raises(PlanError, match="needs one entry a row"):
        lower(TARGETS["tiny"], Shifting("sums").double(), Plan(cp=2))


def test_blocks_stay_on_their_rank_and_shared_slots_are_gathered() -> None:
    for name, kind in {
        "blocks by number": "block", "blocks by anchor": "block", "blocks of a document": "slots",
    }.items():  # fmt: skip
        _, lowered = lowered_for(name, "tiny", 3, 1)
        assert lowered.facts.attentions[-1].branches == (kind,), name
        gathered = sum(
            str(n.target).startswith("spec_compile.gather_") and n.meta["val"].is_floating_point()
            for n in lowered.graphs["stage0"].graph.nodes
        )
        assert (gathered > 0) == (kind == "slots"), name


@pytest.mark.parametrize("size", [0, -1, 2.5, "4"])
def test_anchored_sizes_must_be_counts(size: Any) -> None:
    draft = drafted("sums")
    draft.block_size = size
    with pytest.raises(PlanError, match="block_size and anchors_per_document"):
        lower(TARGETS["tiny"], draft, Plan())
