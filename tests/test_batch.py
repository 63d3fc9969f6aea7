from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from spec_compile.batch import PackedBatch
from spec_compile.checked_batch import check_batch, digest, take_documents
from spec_compile.errors import BatchError
from tests.models import packed_batch

LENGTHS = [7, 21, 1, 35, 0, 3]
VOCAB = 53


def changed(**changes: Any) -> PackedBatch:
    return dataclasses.replace(packed_batch(LENGTHS, vocab=VOCAB), **changes)


def test_constructor_stores_anything_without_raising() -> None:
    anything: Any = object()
    tokens: Any = [1, 2]
    cu: Any = "cu"
    batch = PackedBatch(tokens, cu, anything, {"a": anything}, anchors=anything)
    assert (batch.tokens, batch.cu_seqlens, batch.anchors) == (tokens, cu, anything)


def test_batches_do_not_share_their_default_fields() -> None:
    cu = torch.tensor([0])
    none = torch.zeros(0, dtype=torch.bool)
    assert (
        PackedBatch(none.long(), cu, none).fields is not PackedBatch(none.long(), cu, none).fields
    )


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_pack_in_order_and_go_back(side: str) -> None:
    lengths, width = [3, 0, 5, 1], 6
    ids = torch.arange(24).reshape(4, width)
    mask = torch.zeros(4, width, dtype=torch.int64)
    for row, n in enumerate(lengths):
        mask[row, width - n :] = 1 if side == "left" else 0
        if side == "right":
            mask[row, :n] = 1
    loss_mask = ids % 2 == 0
    batch = PackedBatch.from_padded(ids, mask, loss_mask, advantages=ids * 0.5)
    assert batch.cu_seqlens.tolist() == [0, 3, 3, 8, 9]
    assert batch.tokens.tolist() == ids[mask.bool()].tolist()
    assert batch.loss_mask.tolist() == loss_mask[mask.bool()].tolist()
    assert torch.equal(batch.to_padded(batch.tokens), ids * mask)
    assert torch.equal(batch.to_padded(batch.fields["advantages"]), ids * 0.5 * mask)
    back = batch.to_padded(batch.loss_mask)
    assert back.dtype == torch.bool
    assert torch.equal(back, loss_mask & mask.bool())


def test_padding_survives_replace() -> None:
    mask = torch.tensor([[0, 1], [1, 1]])
    batch = PackedBatch.from_padded(torch.ones(2, 2, dtype=torch.long), mask, mask.bool())
    batch = dataclasses.replace(batch, draft_mask=torch.ones(3, dtype=torch.bool))
    assert batch.to_padded(torch.tensor([1, 2, 3])).tolist() == [[0, 1], [2, 3]]


def test_batch_without_padding_pads_right_to_its_longest_document() -> None:
    cu = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    batch = PackedBatch(torch.arange(5), cu, torch.ones(5, dtype=torch.bool))
    x = torch.arange(10.0).reshape(5, 2)
    padded = batch.to_padded(x)
    assert padded.shape == (3, 3, 2)
    assert padded[..., 0].tolist() == [[0, 2, 0], [0, 0, 0], [4, 6, 8]]


def test_to_padded_carries_gradients() -> None:
    batch = packed_batch([3, 0, 2])
    x = torch.ones(5, requires_grad=True)
    (batch.to_padded(x) * torch.arange(9).reshape(3, 3)).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0, 1, 2, 6, 7]


def test_to_padded_refuses_a_wrong_number_of_rows() -> None:
    with pytest.raises(BatchError, match="T=5"):
        packed_batch([3, 2]).to_padded(torch.zeros(4))


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.tensor([[1, 1, 1], [1, 0, 1]]), "row 1 has a hole"),
        (torch.tensor([[1, 2, 1], [1, 1, 1]]), "0 and 1"),
        (torch.ones(2, 2), "shape"),
    ],
)
def test_bad_attention_mask_is_refused(mask: torch.Tensor, message: str) -> None:
    ids = torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(BatchError, match=message):
        PackedBatch.from_padded(ids, mask, ids.bool())


def test_checked_batch_restarts_positions_and_drops_first_tokens_from_masks() -> None:
    batch = changed(loss_mask=torch.ones(67, dtype=torch.bool), draft_mask=None)
    checked = check_batch(batch, VOCAB)
    assert checked.lengths == LENGTHS
    assert checked.positions.tolist() == [t for n in LENGTHS for t in range(n)]
    assert checked.document.tolist() == [d for d, n in enumerate(LENGTHS) for _ in range(n)]
    assert checked.loss_mask.tolist() == [t > 0 for n in LENGTHS for t in range(n)]
    assert torch.equal(checked.draft_mask, checked.loss_mask)
    assert checked.valid_tokens == 67 - 5
    assert checked.num_documents == 6
    assert bool(batch.loss_mask.all()), "the user's own mask must stay as it was"


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32])
def test_padded_masks_of_numbers_are_read_as_bool(dtype: torch.dtype) -> None:
    ids, real = torch.arange(8).view(2, 4), torch.tensor([[1, 1, 1, 0], [0, 0, 1, 1]])
    loss_mask = torch.tensor([[0, 1, 1, 1], [1, 1, 0, 1]])
    batch = PackedBatch.from_padded(ids, real.to(dtype), loss_mask.to(dtype))
    assert batch.loss_mask.dtype == torch.bool
    assert batch.loss_mask.tolist() == [False, True, True, False, True]
    with pytest.raises(BatchError, match="loss_mask must hold 0 and 1"):
        PackedBatch.from_padded(ids, real, loss_mask.to(dtype) * 2)


def test_own_draft_mask_is_kept_beside_the_loss_mask() -> None:
    batch = changed(draft_mask=torch.arange(67) < 30)
    checked = check_batch(batch, VOCAB)
    assert checked.draft_mask.tolist() == [
        i < 30 and t > 0 for i, t in enumerate(t for n in LENGTHS for t in range(n))
    ]


def test_int32_offsets_are_accepted() -> None:
    batch = packed_batch(LENGTHS, vocab=VOCAB)
    offsets = batch.cu_seqlens.to(torch.int32)
    checked = check_batch(dataclasses.replace(batch, cu_seqlens=offsets), VOCAB)
    assert checked.cu_seqlens.dtype == torch.int64
    assert checked.lengths == LENGTHS


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_empty_batch_is_allowed(lengths: list[int]) -> None:
    checked = check_batch(packed_batch(lengths, vocab=VOCAB), VOCAB)
    assert (checked.num_documents, checked.num_tokens, checked.valid_tokens) == (len(lengths), 0, 0)
    assert digest(checked) != digest(check_batch(packed_batch([2], vocab=VOCAB), VOCAB))


def offsets(*values: int) -> dict[str, torch.Tensor]:
    return {"cu_seqlens": torch.tensor(values)}


MALFORMED: dict[str, tuple[dict[str, Any], str]] = {
    "tokens as a list": ({"tokens": [1, 2]}, "tokens must be a torch.Tensor, found list"),
    "tokens int32": ({"tokens": torch.zeros(67, dtype=torch.int32)}, r"int64.*\.long\(\)"),
    "tokens two-dimensional": ({"tokens": torch.zeros(1, 67, dtype=torch.long)}, "from_padded"),
    "id above the vocabulary": ({"tokens": torch.arange(67)}, r"tokens\[53\] is 53.*0\.\.52"),
    "negative id": ({"tokens": torch.arange(67) % 50 - 1}, r"tokens\[0\] is -1"),
    "offsets as a list": ({"cu_seqlens": [0, 67]}, "cu_seqlens must be a torch.Tensor"),
    "offsets start above 0": (offsets(1, 67), "from 0 to T=67, found 1 to 67"),
    "offsets end early": (offsets(0, 60), "from 0 to T=67, found 0 to 60"),
    "offsets end late": (offsets(0, 90), "from 0 to T=67, found 0 to 90"),
    "offsets decrease": (offsets(0, 40, 30, 67), "found 40 then 30 at document 1"),
    "negative offset": (offsets(0, -1, 67), "found 0 then -1"),
    "no offsets": (offsets(), r"\[N \+ 1\]"),
    "float offsets": ({"cu_seqlens": torch.tensor([0.0, 67.0])}, "found torch.float32"),
    "bool offsets": ({"cu_seqlens": torch.tensor([False, True])}, "found torch.bool"),
    "two-dimensional offsets": ({"cu_seqlens": torch.tensor([[0, 67]])}, r"found shape \[1, 2\]"),
    "int loss mask": ({"loss_mask": torch.ones(67, dtype=torch.long)}, r"loss_mask.*\.bool\(\)"),
    "no loss mask": ({"loss_mask": None}, "loss_mask must be a torch.Tensor"),
    "short loss mask": ({"loss_mask": torch.ones(66, dtype=torch.bool)}, r"\[T=67\]"),
    "float draft mask": ({"draft_mask": torch.ones(67)}, r"draft_mask.*\.bool\(\)"),
    "long draft mask": ({"draft_mask": torch.ones(68, dtype=torch.bool)}, r"\[T=67\]"),
    "mask elsewhere": ({"loss_mask": torch.ones(67, device="meta").bool()}, "found meta"),
    "short field": ({"fields": {"a": torch.zeros(66)}}, r"fields\['a'\] must be \[T=67"),
    "scalar field": ({"fields": {"a": torch.tensor(1.0)}}, r"fields\['a'\]"),
    "field as a list": ({"fields": {"a": [0.0] * 67}}, r"fields\['a'\] must be a torch.Tensor"),
    "field name": ({"fields": {3: torch.zeros(67)}}, "must be str, found 3"),
    "field elsewhere": ({"fields": {"a": torch.zeros(67, device="meta")}}, "found meta"),
    "fields as a list": ({"fields": [1]}, "fields must map"),
    "falling anchors": ({"anchors": torch.tensor([3, 9, 5])}, "ascending, found 9 then 5"),
    "repeated anchor": ({"anchors": torch.tensor([3, 3])}, "ascending, found 3 then 3"),
    "anchor outside": ({"anchors": torch.tensor([3, 67])}, r"rows 0\.\.66, found 67"),
    "anchor below -1": ({"anchors": torch.tensor([3, -2])}, "found -2"),
    "unused not last": ({"anchors": torch.tensor([-1, 4])}, "last"),
    "int32 anchors": ({"anchors": torch.tensor([4], dtype=torch.int32)}, "int64"),
    "anchors as a list": ({"anchors": [4]}, "anchors must be a torch.Tensor"),
    "float anchor seed": ({"anchor_seed": 1.5}, "anchor_seed must be an int, found 1.5"),
    "bool anchor seed": ({"anchor_seed": True}, "anchor_seed must be an int"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_batch_is_refused_with_what_was_found(name: str) -> None:
    changes, message = MALFORMED[name]
    batch = changed(**changes)
    with pytest.raises(BatchError, match=message):
        check_batch(batch, VOCAB)


def test_anything_but_a_packed_batch_is_refused() -> None:
    with pytest.raises(BatchError, match="found dict"):
        check_batch({}, VOCAB)  # type: ignore[arg-type]


CHANGES: dict[str, Callable[[PackedBatch], dict[str, Any]]] = {
    "a token": lambda b: {"tokens": (b.tokens + 1) % VOCAB},
    "offsets": lambda b: offsets(0, 7, 28, 29, 64, 65, 67),
    "an empty document": lambda b: offsets(0, 7, 28, 29, 64, 67),
    "loss mask": lambda b: {"loss_mask": ~b.loss_mask},
    "draft mask": lambda b: {"draft_mask": ~b.loss_mask},
    "a field's value": lambda b: {"fields": {**b.fields, "advantages": b.fields["advantages"] + 1}},
    "a field's name": lambda b: {
        "fields": {"adv": b.fields["advantages"], "old_logprobs": b.fields["old_logprobs"]}
    },
    "a field's dtype": lambda b: {
        "fields": {**b.fields, "advantages": b.fields["advantages"].view(torch.int64)}
    },
    "a field's shape": lambda b: {
        "fields": {**b.fields, "advantages": b.fields["advantages"][:, None]}
    },
    "anchors": lambda b: {"anchors": torch.tensor([4])},
    "no anchors": lambda b: {"anchors": torch.tensor([], dtype=torch.int64)},
    "anchor seed": lambda b: {"anchor_seed": 1},
}


@pytest.mark.parametrize("name", CHANGES)
def test_digest_sees_a_change_of(name: str) -> None:
    batch = packed_batch(LENGTHS, vocab=VOCAB)
    other = dataclasses.replace(batch, **CHANGES[name](batch))
    assert digest(check_batch(batch, VOCAB)) != digest(check_batch(other, VOCAB))


def test_digest_ignores_the_order_of_fields_and_the_memory_layout() -> None:
    batch = packed_batch(LENGTHS, vocab=VOCAB)
    other = dataclasses.replace(
        batch,
        tokens=torch.stack((batch.tokens, batch.tokens), 1)[:, 0],
        fields=dict(reversed(list(batch.fields.items()))),
    )
    assert digest(check_batch(batch, VOCAB)) == digest(check_batch(other, VOCAB))


def test_micro_batch_holds_its_documents_and_knows_where_they_came_from() -> None:
    batch = packed_batch(LENGTHS, vocab=VOCAB, draft_mask=True)
    full = check_batch(batch, VOCAB)
    part = take_documents(full, [1, 3, 4])
    rows = [*range(7, 28), *range(29, 64)]
    assert part.rows.tolist() == rows
    assert part.lengths == [21, 35, 0]
    assert part.cu_seqlens.tolist() == [0, 21, 56, 56]
    for name in ("tokens", "loss_mask", "draft_mask", "positions"):
        assert torch.equal(getattr(part, name), getattr(full, name)[rows])
    assert part.document.tolist() == [0] * 21 + [1] * 35
    assert torch.equal(part.fields["advantages"], full.fields["advantages"][rows])
    assert take_documents(part, [1]).rows.tolist() == list(range(29, 64))


def test_anchors_are_rebased_to_the_micro_batch() -> None:
    anchors = torch.tensor([2, 7, 27, 28, 40, 63, 66, -1, -1])
    full = check_batch(changed(anchors=anchors), VOCAB)
    first = take_documents(full, [1, 3]).anchors
    second = take_documents(full, [0, 2, 4, 5]).anchors
    assert first is not None
    assert second is not None
    assert first.tolist() == [0, 20, 32, 55]
    assert second.tolist() == [2, 7, 10]


def test_micro_batch_of_no_documents_is_empty() -> None:
    part = take_documents(check_batch(changed(anchors=torch.tensor([3])), VOCAB), [])
    assert (part.num_tokens, part.num_documents) == (0, 0)
    assert part.anchors is not None
    assert part.anchors.tolist() == []
    assert part.fields["advantages"].shape == (0,)
