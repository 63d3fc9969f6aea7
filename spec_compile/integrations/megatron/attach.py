"""Attach a draft to a Megatron-core model: what `parallelize` does for plain ones, around another's schedule."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from spec_compile.api import weights_digest
from spec_compile.batch import PackedBatch
from spec_compile.errors import ConfigError, PlanError
from spec_compile.lowering import Lowered, lower
from spec_compile.plan import Plan
from spec_compile.runtime import weights
from spec_compile.runtime.balance import Balance
from spec_compile.runtime.binding import Ownership, anchor_rule, draft_steps, release_others
from spec_compile.runtime.entry import Entry
from spec_compile.runtime.failure import SharedFailure
from spec_compile.runtime.gradients import GradientLedger, OwnedParameters
from spec_compile.runtime.modes import inference_refusal, own_modes
from spec_compile.runtime.processes import join, open_world
from spec_compile.runtime.results import collect, draft_metrics
from spec_compile.runtime.stage_run import StepOptions, Sums
from spec_compile.runtime.world import World

from . import chunks
from .hooks import ModelHooks
from .result import DraftResult
from .silhouette import HIDDEN, Silhouette, crossing_values
from .step import DraftStep, Placing
from .taps import MegatronTaps

log = logging.getLogger(__name__)


def attach(
    model_chunks: nn.Module | Sequence[nn.Module],
    draft: nn.Module,
    plan: Plan | None = None,
    *,
    vocab_size: int | None = None,
) -> MegatronDraft:
    """Attach a draft to the model chunks of this rank; every rank calls it, with the same draft.

    The draft's rows are shared by the context- and tensor-parallel ranks of the last stage, as Megatron has laid
    them out; on other ranks its parameters move to the meta device.

    Args:
        model_chunks: GPTModel of this rank, or one a virtual stage, wrapped or not.
        draft: module of the draft contract on the model's device, with the same weights on every rank.
        plan: numerics, timeouts, ``draft_weight``, ``seed``, ``tap_transport``; its sizes come from Megatron.
        vocab_size: ids of the draft's vocabulary; None: all rows of Megatron's padded table.

    Raises:
        ConfigError: an argument is of a wrong type, or Megatron's state is not what is supported.
        PlanError: model and draft do not fit.
        ChannelError: a rank died or did not come.
    """
    models = chunks.unwrap(model_chunks)
    place = chunks.place(models)
    sizes = _sized(plan or Plan(), place)
    control = join(sizes.world_size, timeout_s=sizes.timeout_s, deadline_s=sizes.entry_timeout_s)
    world: World | None = None
    try:
        lowered = _lower(models, draft, sizes, vocab_size or models[0].vocab_size)
        world = open_world(control, sizes, next(models[0].parameters()).device)
        _agree(world, lowered, draft)
        return MegatronDraft(models, draft, lowered, world, place, sizes)
    except BaseException as error:
        control.fail(error)
        (world or control).close()
        raise


class MegatronDraft:
    """A draft that trains beside a Megatron-core model; made by `attach`."""

    def __init__(
        self,
        models: Sequence[Any],
        draft: nn.Module,
        lowered: Lowered,
        world: World,
        place: chunks.Place,
        plan: Plan,
    ) -> None:
        self.lowered, self.draft, self.plan, self.place = lowered, draft, plan, place
        self._models, self._world = list(models), world
        self._vocab = _vocabulary(lowered)
        self._wanted = crossing_values(lowered)
        self._owners: dict[str, tuple[int, ...]] = {
            name: (place.pp - 1,) for name, _ in draft.named_parameters(remove_duplicate=False)
        }
        trained = [p for p in draft.parameters() if p.requires_grad] if place.is_last else []
        self._owned = OwnedParameters([], trained, [], counts_tied=False)
        self._ledger = GradientLedger(self._owned, world.fabrics)
        self._entry = Entry(
            world,
            plan,
            self._vocab,
            lowered.programs.count,
            draft_steps(lowered),
            anchor_rule(lowered),
        )
        self._placing = Placing(chunks.sharding_of(models, place), anchor_rule(lowered))
        self._taps = MegatronTaps(
            models, [w for w in self._wanted if w != HIDDEN], world, place, plan, lowered.plan_hash
        )
        self._step: DraftStep | None = None
        self._hooks = ModelHooks(
            models, self._taps.wanted, self._tapped, self._finished, self._entered
        )
        self._closed = False
        release_others(Ownership({}, self._owners), nn.Module(), draft, lowered, place.rank[0])

    def param_groups(self, **settings: Any) -> list[dict[str, Any]]:
        """One optimizer group with the draft's parameters, empty on ranks before the last stage."""
        return [{"params": self._owned.draft, **settings, "name": "draft"}]

    @contextlib.contextmanager
    def step(
        self,
        batches: Sequence[PackedBatch],
        *,
        draft_weight: float | None = None,
        draft_denominator: Any = None,
        train: bool = True,
    ) -> Iterator[DraftResult]:
        """Go around one call of Megatron's forward-backward function.

        The draft runs forward and backward inside the last stage's forward of each micro-batch. At the end its
        gradients, summed over data-, context- and tensor-parallel ranks, are in ``.grad`` of its parameters.

        Args:
            batches: the micro-batches of this data-parallel rank in order, the same on all its other ranks. One
                made by `PackedBatch.from_padded` stands for [B, S] tokens; one without padding for B = 1, S = T.
            draft_weight: factor on the gradients; None: the plan's.
            draft_denominator: replaces the global count.
            train: False measures the loss alone, for instance around a ``forward_only`` call.

        Raises:
            BatchError: on every rank, when a batch is malformed or ranks disagree.
            ConfigError: the schedule ran other micro-batches than these.
            ChannelError: a peer died, stopped, or missed a deadline.
        """
        self._check_free()
        result = DraftResult()
        refusal = inference_refusal("step") if train else None
        with self._shared():
            arguments = {
                "draft_weight": draft_weight,
                "draft_denominator": draft_denominator,
                "micro_batches": len(batches),
                "train_draft": train,
            }
            agreed = self._entry.meet("step", list(batches), arguments, refusal)
            placed = self._placing(batches, agreed.batches)
            divisor = agreed.draft_divisor()
            assert divisor is not None, "a draft without a count program is refused at the start"
            given = agreed.arguments["draft_weight"]
            weight = self.plan.draft_weight if given is None else given
            self._refresh_tables()
            self._taps.begin_step([one.num_rows for one in placed.micro_batches])
            scale = torch.where(divisor == 0, 0.0, weight / divisor.clamp_min(1e-300))
            options = StepOptions(draft_scale=scale, run_draft=True, draft_grad=train)
            self._step = DraftStep(
                self.lowered, placed, options, self._world, self._taps, self._owned.draft
            )
        self._ledger.begin()
        try:
            yield result
            with self._shared():
                self._complete(result, divisor)
        except BaseException as error:
            self._ledger.restore()
            self._world.control.fail(error)
            raise
        finally:
            self._step = None

    def export_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield the draft's tensors under their public names; collective, exhaust it on every rank."""
        self._check_free()
        return weights.export_weights(self.draft, self._owners, self._world.fabrics["pp"], dtype)

    def close(self) -> None:
        """Take the hooks off, free channels and own groups; idempotent. The model is as it was."""
        if not self._closed:
            self._closed = True
            self._hooks.remove()
            self._taps.close()
            self._world.close()

    def _complete(self, result: DraftResult, divisor: Tensor) -> None:
        assert self._step is not None
        self._step.check_complete(self.place.is_last)
        sums = self._step.sums if self.place.is_last else Sums()
        deadline_s = self.plan.timeout_s
        totals = collect(
            self._world, sums, Balance(), is_last=self.place.is_last, deadline_s=deadline_s
        )
        self._ledger.finish(["draft"])
        result.draft_loss, result.metrics = draft_metrics(totals, divisor)

    def _entered(self, arguments: Mapping[str, Any]) -> None:
        packed = arguments.get("packed_seq_params") is not None
        if self._step is not None and packed and self.place.cp > 1:
            raise ConfigError(
                "packed_seq_params are cut over context parallel ranks document by document, which is not supported "
                "beside a draft; give each sequence a row of its own, or use context parallel size 1"
            )

    def _tapped(self, chunk: int, tap: int, hidden: Tensor) -> None:
        if self._step is not None:
            with own_modes(self._world.device, False):
                self._step.tapped(chunk, tap, hidden.detach())

    def _finished(self, hidden: Tensor) -> None:
        if self._step is not None:
            grad, fixed = self._step.options.draft_grad, self.plan.deterministic
            with own_modes(self._world.device, grad, deterministic=fixed):
                self._step.finished(hidden.detach(), self._wanted)

    def _refresh_tables(self) -> None:
        """Put the target's embedding and head, as they are now, under the draft's program."""
        last, pp = self.place.pp - 1, self._world.fabrics["pp"]
        shard = chunks.embedding_shard(self._models)
        needs = self.lowered.facts.embedding_name in self._read
        if needs and self.place.pp > 1 and not self._models[0].share_embeddings_and_output_weights:
            if self.place.rank[0] == 0:
                assert shard is not None
                pp.send(shard.contiguous(), last)
            elif self.place.is_last:
                like = chunks.head_shard(self._models[-1])
                shard = pp.recv(tuple(like.shape), like.dtype, 0)
            pp.flush()
        if not self.place.is_last:
            return
        tables = {self.lowered.facts.head_name: chunks.head_shard(self._models[-1])}
        if needs and shard is not None:
            tables[self.lowered.facts.embedding_name] = shard
        for name in [name for name in tables if name in self._read]:
            whole = chunks.whole_table(tables[name], self.place, self._vocab)
            _put(self.lowered.programs.draft, name, whole)

    @property
    def _read(self) -> set[str]:
        graph = self.lowered.programs.draft
        assert graph is not None
        return {str(node.target) for node in graph.graph.nodes if node.op == "get_attr"}

    @contextlib.contextmanager
    def _shared(self) -> Iterator[None]:
        """Raise what all ranks know of as itself, and tell all ranks about any other error."""
        try:
            yield
        except SharedFailure as failure:
            raise failure.error from None
        except BaseException as error:
            self._world.control.fail(error)
            raise

    def _check_free(self) -> None:
        if self._closed:
            raise ConfigError("this draft was detached; call attach again")
        if self._step is not None:
            raise ConfigError("a step is open already; leave its with block first")
        self._world.control.check()


def _sized(plan: Plan, place: chunks.Place) -> Plan:
    """The plan with Megatron's sizes, in which tensor-parallel ranks count as context-parallel ones."""
    if plan.world_size != 1 or plan.max_tokens_per_micro_batch is not None:
        raise ConfigError(
            "leave dp, cp, pp and the micro-batches of the plan alone: Megatron has its own"
        )
    several = {"schedule": "interleaved", "stages_per_rank": place.num_chunks}
    schedule: Mapping[str, Any] = several if place.num_chunks > 1 else {"schedule": "1f1b"}
    return replace(plan, dp=place.dp, cp=place.cp * place.tp, pp=place.pp, **schedule)


def _lower(models: Sequence[Any], draft: nn.Module, plan: Plan, vocab_size: int) -> Lowered:
    config = models[0].config
    weight = next(models[0].parameters())
    target = Silhouette(
        config.num_layers,
        vocab_size,
        config.hidden_size,
        device=weight.device,
        dtype=config.params_dtype,
    )
    lowered = lower(target, draft, replace(plan, dp=1, pp=1, schedule="1f1b", stages_per_rank=None))
    if lowered.programs.count is None:
        raise PlanError(
            f"the count of {type(draft).__name__} depends on activations; beside Megatron's schedule it must be a "
            "function of ids, masks and anchors"
        )
    return lowered


def _agree(world: World, lowered: Lowered, draft: nn.Module) -> None:
    mine = {"hash": lowered.plan_hash, "weights": weights_digest(draft)}
    replies = world.control.all_gather(mine, deadline_s=lowered.plan.entry_timeout_s)
    for rank, other in enumerate(replies):
        if other != mine:
            raise PlanError(
                f"ranks {rank} and {world.rank} were given other plans, drafts or draft weights; build the draft from "
                "one seed or checkpoint on every rank"
            )


def _vocabulary(lowered: Lowered) -> int:
    return int(lowered.programs.policy.get_parameter(lowered.facts.embedding_name).shape[0])


def _put(gm: nn.Module | None, name: str, table: Tensor) -> None:
    assert gm is not None
    path, _, leaf = name.rpartition(".")
    gm.get_submodule(path)._parameters[leaf] = nn.Parameter(table, requires_grad=False)
