"""A draft beside real Megatron-core models on gloo processes: its training, and that the policy's is untouched."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from examples.megatron_core.on_cpu import core
from spec_compile.errors import BatchError, ConfigError
from tests.integrations import megatron_cpu as mcore
from tests.integrations.megatron_drafts import (
    PLAN,
    REAL,
    Seen,
    check,
    dflash,
    eagle3,
    micro_batches,
    reference,
    run,
)
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
