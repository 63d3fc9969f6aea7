"""Where the bridge looks for rows in Megatron's activations; needs no Megatron."""

from __future__ import annotations

import pytest
import torch

import spec_compile as sc
from spec_compile.batch import PackedBatch
from spec_compile.checked_batch import check_batch
from spec_compile.drafts.eagle3_config import Eagle3Config
from spec_compile.errors import BatchError
from spec_compile.integrations.megatron.rows import Sharding, place
from spec_compile.integrations.megatron.silhouette import HIDDEN, Silhouette, crossing_values

LENGTH = 24


def padded() -> PackedBatch:
    """Three sequences of 24, 9 and 0 tokens; the second is padded on the left."""
    real = torch.zeros(3, LENGTH, dtype=torch.bool)
    real[0] = True
    real[1, -9:] = True
    tokens = torch.arange(3 * LENGTH).reshape(3, LENGTH)
    return PackedBatch.from_padded(tokens, real, real)


def activations(cp: int, tp: int, sequence_parallel: bool) -> list[torch.Tensor]:
    """[s, b] of each rank, cp outermost: the padded form's own numbers, cut as Megatron cuts sequences."""
    whole = torch.arange(3 * LENGTH).reshape(3, LENGTH).T
    chunks = whole.chunk(2 * cp)
    ranks: list[torch.Tensor] = []
    for c in range(cp):
        mine = torch.cat([chunks[c], chunks[2 * cp - 1 - c]]) if cp > 1 else whole
        ranks += mine.chunk(tp) if sequence_parallel else [mine] * tp
    return ranks


@pytest.mark.parametrize(
    ("cp", "tp", "sequence_parallel"),
    [
        (1, 1, False),
        (1, 2, True),
        (1, 5, False),
        (2, 1, False),
        (2, 2, True),
        (3, 4, True),
        (2, 7, False),
    ],
)
def test_every_token_is_found_once_in_the_activations_of_its_rank(
    cp: int, tp: int, sequence_parallel: bool
) -> None:
    batch = padded()
    assert batch.padding is not None
    placed = place(batch, check_batch(batch, 1000), Sharding(cp, tp, sequence_parallel))
    layout = placed.layout
    assert sorted(layout.slots.tolist()) == list(range(cp * tp * layout.rows_per_rank))
    found = 0
    for rank, local in enumerate(activations(cp, tp, sequence_parallel)):
        assert placed.local == tuple(local.shape)
        rows = torch.from_numpy(layout.rows(rank))
        values = local.reshape(-1)[placed.takes[rank]]
        live = rows < layout.num_tokens
        assert torch.equal(batch.padding.rows[rows[live]], values[live])
        assert bool((rows.diff() > 0).all())
        found += int(live.sum())
    assert found == layout.num_tokens


def test_batch_without_padding_is_one_sequence() -> None:
    batch = PackedBatch(
        torch.arange(10), torch.tensor([0, 3, 10]), torch.ones(10, dtype=torch.bool)
    )
    placed = place(batch, check_batch(batch, 1000), Sharding(1, 2, True))
    assert placed.local == (5, 1)
    assert [take.tolist() for take in placed.takes] == [[0, 1, 2, 3, 4]] * 2


def test_sequences_that_do_not_divide_are_refused() -> None:
    with pytest.raises(BatchError, match="multiple of 20"):
        place(padded(), check_batch(padded(), 1000), Sharding(2, 5, True))


def test_silhouette_tells_which_taps_a_draft_reads() -> None:
    config = Eagle3Config(
        taps=(3, 0, 3),
        ttt_length=2,
        hidden_size=8,
        target_hidden_size=8,
        head_dim=4,
        vocab_size=11,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=8,
    )
    target = Silhouette(5, 11, 8, device=torch.device("cpu"), dtype=torch.float32)
    lowered = sc.lower(target, sc.drafts.Eagle3(config), sc.Plan(cp=2))
    assert sorted(crossing_values(lowered)) == [HIDDEN, 0, 3]
    assert "equals the eager modules" in lowered.verified
