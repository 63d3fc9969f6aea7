"""One draft and one schedule of micro-batches beside Megatron-core models, and what the draft's numbers must be."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spec_compile as sc
from examples.megatron_core.on_cpu import core
from spec_compile.batch import PackedBatch
from spec_compile.contract import DraftInputs, TeacherView
from spec_compile.drafts.dflash_config import DFlashConfig
from spec_compile.drafts.eagle3_config import Eagle3Config
from tests.integrations import megatron_cpu as mcore
from tests.models import randomise
from tests.ranks import run_processes

REAL = ((12, 7), (9, 12), (12, 0), (1, 12))
"""Tokens of each sequence of each micro-batch; the rest is padding on the right."""
PLAN = sc.Plan(timeout_s=30.0, entry_timeout_s=60.0)


def micro_batches(
    number: int = len(REAL), *, seed: int = 5
) -> tuple[list[Tensor], list[PackedBatch]]:
    """What Megatron runs, [B, S] ids, and the same as packed batches."""
    generator = torch.Generator().manual_seed(seed)
    ids, packed = [], []
    for lengths in REAL[:number]:
        tokens = torch.randint(0, mcore.VOCAB, (2, mcore.LENGTH), generator=generator)
        real = torch.arange(mcore.LENGTH) < torch.tensor(lengths)[:, None]
        mask = torch.rand(tokens.shape, generator=generator) < 0.8
        ids.append(tokens)
        packed.append(PackedBatch.from_padded(tokens, real, mask))
    return ids, packed


SIZES: dict[str, Any] = {
    "hidden_size": mcore.HIDDEN,
    "target_hidden_size": mcore.HIDDEN,
    "intermediate_size": 20,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 6,
    "vocab_size": mcore.VOCAB,
}


def eagle3() -> nn.Module:
    """Taps of the embedding, of a first stage, and of the last one."""
    return randomise(sc.drafts.Eagle3(Eagle3Config(taps=(0, 2, 3), ttt_length=3, **SIZES)), 1)


def dflash() -> nn.Module:
    """A block draft, which reads anchors and the embedding of a constant."""
    own: dict[str, Any] = {
        "block_size": 3,
        "anchors_per_document": 4,
        "num_hidden_layers": 2,
        "mask_token_id": 5,
    }
    return randomise(sc.drafts.DFlash(DFlashConfig(taps=(1, 3), **own, **SIZES)), 1)


@dataclass
class Seen:
    """What one run of a rank left."""

    losses: list[float]
    policy: dict[str, Tensor]
    draft_loss: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    draft: dict[str, Tensor] = field(default_factory=dict)


def run(
    pp: int = 1,
    tp: int = 1,
    chunks: int = 1,
    *,
    make: Any = eagle3,
    steps: int = 1,
    forward_only: bool = False,
    **model: Any,
) -> list[tuple[Seen, Seen]]:
    """Train once without and ``steps`` times with a draft; (without, with) of every rank."""

    def rank_body(rank: int) -> tuple[Seen, Seen]:
        from spec_compile.integrations import megatron

        mcore.start(pp, tp, chunks)
        models = mcore.build(pp, tp, chunks, **model)
        ids, packed = micro_batches()
        alone = Seen(mcore.train(models, ids, forward_only=forward_only), mcore.gradients(models))
        draft = make()
        handle = megatron.attach(models, draft, PLAN)
        for _ in range(steps):
            for module in models:
                module.zero_grad()
            with handle.step(packed, train=not forward_only) as result:
                losses = mcore.train(models, ids, forward_only=forward_only)
        grads = {n: p.grad for n, p in draft.named_parameters() if p.grad is not None}
        both = Seen(losses, mcore.gradients(models), result.draft_loss, result.metrics, grads)
        handle.close()
        return alone, both

    core("models.gpt")  # imported once, before the fork
    return run_processes(pp * tp, rank_body, timeout=110)


@functools.cache
def hidden_states(tied: bool = False) -> list[list[Tensor]]:
    """Of each micro-batch: the residual stream after 0..L layers and the final hidden state, [S, B, D]."""

    def rank_body(rank: int) -> list[list[Tensor]]:
        mcore.start()
        (model,) = mcore.build(tied=tied)
        seen: list[list[Tensor]] = []

        def keep(module: Any, args: Any, output: Any) -> None:
            seen[-1].append((output[0] if isinstance(output, tuple) else output).detach())

        model.embedding.register_forward_pre_hook(lambda *a: seen.append([]))
        for module in (model.embedding, *model.decoder.layers, model.decoder):
            module.register_forward_hook(keep)
        mcore.train([model], micro_batches()[0], forward_only=True)
        weights = [
            model.embedding.word_embeddings.weight,
            model.shared_embedding_or_output_weight(),
        ]
        if not tied:
            weights[1] = model.output_layer.weight
        return [*seen, [w.detach() for w in weights]]

    core("models.gpt")
    return run_processes(1, rank_body, timeout=60)[0]


def reference(make: Any, *, tied: bool = False) -> Seen:
    """The draft on the unpipelined model's hidden states: eager, dense, one micro-batch after the other."""
    *states, (embedding, head) = hidden_states(tied)
    draft = make()
    outputs = []
    for layers, batch in zip(states, micro_batches()[1], strict=True):
        assert batch.padding is not None
        rows = [x.transpose(0, 1).reshape(-1, mcore.HIDDEN)[batch.padding.rows] for x in layers]
        lengths = batch.cu_seqlens.diff()
        document = torch.arange(len(lengths)).repeat_interleave(lengths)
        index = torch.arange(len(batch.tokens))
        positions = index - batch.cu_seqlens[:-1][document]
        inputs = DraftInputs(
            features=torch.cat([rows[i] for i in draft.taps], -1),
            tokens=batch.tokens,
            positions=positions,
            document=document,
            index=index,
            loss_mask=batch.loss_mask & (positions > 0),
            embedding=lambda ids: F.embedding(ids, embedding),
            teacher=TeacherView(rows[-1], head),
            anchors=anchors_of(batch, positions) if make is dflash else None,
        )
        outputs.append(draft(inputs))
    count = torch.stack([o.count for o in outputs]).sum(0)
    loss = (torch.stack([o.loss_sum for o in outputs]).sum(0) / count.clamp_min(1)).sum()
    loss.backward()
    grads = {n: p.grad for n, p in draft.named_parameters() if p.grad is not None}
    return Seen([], {}, float(loss.detach()), {}, grads)


def anchors_of(batch: PackedBatch, positions: Tensor) -> Tensor:
    """All rows whose next token is a target, as few documents have more than four."""
    from spec_compile.checked_batch import check_batch
    from spec_compile.runtime.anchors import AnchorRule, draw_anchors

    return draw_anchors(check_batch(batch, mcore.VOCAB), AnchorRule(4, 0))


def check(seen: list[tuple[Seen, Seen]], expected: Seen, tolerance: float) -> None:
    """The policy is bit-equal with and without the draft; the draft's numbers are the reference's."""
    for alone, both in seen:
        assert both.losses == alone.losses
        assert both.policy.keys() == alone.policy.keys()
        for name, grad in alone.policy.items():
            assert torch.equal(both.policy[name], grad), name
        assert both.draft_loss == pytest.approx(expected.draft_loss, rel=tolerance)
    holders = [both.draft for _, both in seen if both.draft]
    assert holders
    for grads in holders:
        assert grads.keys() == expected.draft.keys()
        for name, grad in expected.draft.items():
            scale = float(grad.abs().max()) + 1e-6
            torch.testing.assert_close(grads[name], grad, rtol=0, atol=tolerance * scale)
