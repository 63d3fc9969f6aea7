"""A draft beside real Megatron-core models on gloo processes: its training, and that the policy's is untouched."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import re
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
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
from spec_compile.errors import BatchError, ConfigError
from tests.integrations import megatron_cpu as mcore
from tests.models import randomise
from tests.ranks import free_port, process_outcomes, run_processes

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"
    ),
]

ROOT = Path(__file__).parents[2]
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


GRIDS = {
    "no pipelining": {},
    "1F1B": {"pp": 2},
    "interleaved": {"pp": 2, "chunks": 2},
    "tp 2": {"tp": 2},
    "tp 2 with sequence parallel": {"tp": 2, "sequence_parallel": True},
    "1F1B with tp 2, sequence parallel and recomputation": {
        "pp": 2, "tp": 2, "sequence_parallel": True, "recompute": True,
    },
    "1F1B with recomputation": {"pp": 2, "recompute": True},
    "1F1B with tied embeddings": {"pp": 2, "tied": True},
}  # fmt: skip


@pytest.mark.parametrize("grid", GRIDS)
def test_draft_trains_as_on_the_unpipelined_model(grid: str) -> None:
    options: dict[str, Any] = GRIDS[grid]
    check(run(**options), reference(eagle3, tied=options.get("tied", False)), 2e-4)


@pytest.mark.parametrize(
    "grid", ["interleaved", "1F1B with tp 2, sequence parallel and recomputation"]
)
def test_block_draft_trains_as_on_the_unpipelined_model(grid: str) -> None:
    options: dict[str, Any] = GRIDS[grid]
    check(run(make=dflash, **options), reference(dflash), 2e-4)


def test_data_parallel_ranks_sum_their_draft_gradients() -> None:
    def rank_body(rank: int) -> tuple[float, dict[str, Tensor]]:
        from spec_compile.integrations import megatron

        mcore.start()
        models = mcore.build()
        ids, packed = micro_batches()
        draft = eagle3()
        handle = megatron.attach(models, draft, PLAN)
        mine = slice(2 * rank, 2 * rank + 2)
        with handle.step(packed[mine]) as result:
            mcore.train(models, ids[mine])
        handle.close()
        return result.draft_loss, {
            n: p.grad for n, p in draft.named_parameters() if p.grad is not None
        }

    core("models.gpt")
    expected = reference(eagle3)
    for loss, grads in run_processes(2, rank_body, timeout=60):
        check([(Seen([], {}), Seen([], {}, loss, {}, grads))], expected, 2e-4)


def test_context_parallel_rows_are_those_that_megatron_hands_out() -> None:
    """Its own attention has no context parallelism without a GPU, so these layers have none: rows stay rows."""

    def rank_body(rank: int, cp: int) -> tuple[float, dict[str, Tensor]]:
        from spec_compile.integrations import megatron

        mcore.start(cp=cp)
        models = mcore.build(cp=cp, attention=False)
        ids, packed = micro_batches()
        draft = eagle3()
        handle = megatron.attach(models, draft, PLAN)
        with handle.step(packed) as result:
            mcore.train(models, ids)
        handle.close()
        return result.draft_loss, {
            n: p.grad for n, p in draft.named_parameters() if p.grad is not None
        }

    core("models.gpt")
    ((loss, grads),) = run_processes(1, lambda rank: rank_body(rank, 1), timeout=60)
    expected = Seen([], {}, loss, {}, grads)
    for loss, grads in run_processes(2, lambda rank: rank_body(rank, 2), timeout=60):
        check([(Seen([], {}), Seen([], {}, loss, {}, grads))], expected, 2e-4)


def test_forward_only_measures_the_loss_and_leaves_no_gradient() -> None:
    expected = reference(eagle3)
    for _, seen in run(pp=2, forward_only=True):
        assert seen.draft_loss == pytest.approx(expected.draft_loss, rel=2e-4)
        assert not seen.draft


def test_gradients_accumulate_over_steps() -> None:
    expected = reference(eagle3)
    doubled = replace(expected, draft={n: 2 * g for n, g in expected.draft.items()})
    check(run(pp=2, steps=2), doubled, 2e-4)


@pytest.mark.parametrize("chunks", [1, 2])
def test_schedule_runs_in_the_order_from_which_slots_are_counted(chunks: int) -> None:
    from spec_compile.runtime.schedule import build_schedule

    def rank_body(rank: int) -> list[str]:
        mcore.start(pp=2, chunks=chunks)
        models = mcore.build(pp=2, chunks=chunks)
        found: list[str] = []
        for chunk, model in enumerate(models):
            stage = 2 * chunk + rank
            model.register_forward_hook(lambda *a, s=stage: found.append(f"{s}F"))
            model.register_full_backward_hook(lambda *a, s=stage: found.append(f"{s}B"))
        mcore.train(models, micro_batches()[0])
        return found

    core("models.gpt")
    found = run_processes(2, rank_body, timeout=60)
    name = "interleaved" if chunks > 1 else "1f1b"
    for rank, actions in enumerate(build_schedule(name, 2, len(REAL), chunks)):
        # the first stage's inputs are ids: autograd has no backward to call a hook for
        expected = [f"{a.stage}{a.kind}" for a in actions if a.kind == "F" or a.stage > 0]
        assert [x for x in found[rank] if x != "0B"] == expected


def test_channels_have_fewer_slots_than_micro_batches() -> None:
    def rank_body(rank: int) -> dict[int, int]:
        from spec_compile.integrations import megatron

        mcore.start(pp=2)
        models = mcore.build(pp=2)
        ids, packed = micro_batches()
        handle = megatron.attach(models, eagle3(), PLAN)
        with handle.step(packed):
            mcore.train(models, ids)
        channels = handle._taps.channels
        assert channels is not None
        depths = channels.depths
        handle.close()
        return depths

    core("models.gpt")
    assert run_processes(2, rank_body, timeout=60) == [{0: 2}, {0: 2}]


def refused(body: Any, world: int = 2) -> list[Any]:
    """Attach to two stages, run ``body(handle, models)`` on each, and return what each raised."""

    def rank_body(rank: int) -> None:
        from spec_compile.integrations import megatron

        mcore.start(pp=world)
        models = mcore.build(pp=world)
        handle = megatron.attach(models, eagle3(), PLAN)
        with contextlib.closing(handle):
            body(handle, models, rank)

    core("models.gpt")
    return [outcome.error for outcome in process_outcomes(world, rank_body, timeout=60)]


def test_batches_that_differ_between_stages_are_refused_on_every_rank() -> None:
    def body(handle: Any, models: Any, rank: int) -> None:
        with handle.step(micro_batches(seed=rank)[1]):
            pytest.fail("the step was entered")

    errors = refused(body)
    assert all(isinstance(error, BatchError) for error in errors), errors


def test_other_number_of_micro_batches_is_refused() -> None:
    def body(handle: Any, models: Any, rank: int) -> None:
        ids, packed = micro_batches()
        with handle.step(packed):
            mcore.train(models, ids[:3])

    errors = refused(body)
    assert any(isinstance(error, ConfigError) for error in errors), errors
    assert all(error is not None and "micro-batches" in str(error) for error in errors), errors


def test_padded_form_of_another_shape_is_refused() -> None:
    def body(handle: Any, models: Any, rank: int) -> None:
        ids, packed = micro_batches()
        with handle.step([replace(batch, padding=None) for batch in packed]):
            mcore.train(models, ids)

    errors = refused(body, world=1)
    assert isinstance(errors[0], ConfigError)
    assert "padded form" in str(errors[0])


def test_model_is_as_it_was_after_close() -> None:
    def body(handle: Any, models: Any, rank: int) -> None:
        handle.close()
        assert not any(
            m._forward_hooks or m._forward_pre_hooks for x in models for m in x.modules()
        )
        assert mcore.train(models, micro_batches()[0]) is not None

    assert refused(body) == [None, None]


def test_example_trains_both_models() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-port", str(free_port()), "-m", "examples.megatron_core", "--pp", "2"]
    done = subprocess.run(
        [*command, "--steps", "10"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    losses = [float(part) for part in re.findall(r"loss (\d+\.\d+)", done.stdout)]
    assert len(losses) == 4, done.stdout
    assert losses[2] < losses[0]
    assert losses[3] < losses[1]
