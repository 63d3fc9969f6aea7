"""The bound model: one rank's part of a joint training step, driven by any training loop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from spec_compile.batch import PackedBatch
from spec_compile.contract import TokenOutputs
from spec_compile.errors import BatchError, ConfigError

from . import weights
from .binding import LoweredStep, owned_parameters, ownership, release_others, stage_graphs
from .calls import Caller
from .differentiable import differentiable_rows
from .entry import Agreement, Entry
from .gradients import GradientLedger, clip
from .micro_batch import MicroBatch
from .results import (
    Evaluation,
    SharedFailure,
    StepResult,
    Totals,
    collect,
    draft_metrics,
    policy_metrics,
    ratio,
)
from .stage_run import PolicyLoss, StageRun, StepOptions
from .world import World


class ParallelModel:
    """A target and a draft bound to one rank; made by ``spec_compile.parallelize``.

    All methods but `param_groups`, `state_dict`, `load_state_dict` and `close` are collective: every
    rank calls them in the same order with the same arguments.
    """

    def __init__(
        self, lowered: LoweredStep, world: World, target: nn.Module, draft: nn.Module | None
    ) -> None:
        self.lowered = lowered
        self.plan = lowered.plan
        self.target, self.draft = target, draft
        self._world = world
        place, stages = world.coordinates, self.plan.num_stages
        self._owners = ownership(lowered, target, draft)
        self._owned = owned_parameters(self._owners, target, draft, place.pp, stages)
        self._ledger = GradientLedger(self._owned, world.fabrics)
        self._caller = Caller(lowered, world, stage_graphs(lowered, place.pp), self._owned.draft)
        self._entry = Entry(world, self.plan, _vocab_size(target), lowered.programs.count)
        # last: modules that could not be bound keep their weights
        release_others(self._owners, target, draft, lowered, place.pp)
        self._steps = 0
        self._closed = False

    @property
    def dp_rank(self) -> int:
        """Which of the global batch's parts this rank is to be given."""
        return self._world.coordinates.dp

    @property
    def dp_size(self) -> int:
        """Number of parts of the global batch."""
        return self.plan.dp

    def step(
        self,
        batch: PackedBatch,
        policy_loss: PolicyLoss | None,
        denominator: float | None = None,
        draft_denominator: Any = None,
        draft_weight: float | None = None,
        temperature: float = 1.0,
        train_draft: bool = True,
    ) -> StepResult:
        """Forward and backward of all micro-batches; adds to ``.grad`` of the original parameters.

        Args:
            batch: this rank's batch (that of `dp_rank`).
            policy_loss: sum over one micro-batch's rows, optionally with named sums; None trains the
                draft alone.
            denominator: what the policy's sums are divided by; None: the global number of valid tokens.
            draft_denominator: replaces the draft's global count, a number or one a step.
            draft_weight: factor on the draft's gradients; None: the plan's.
            temperature: of the policy's log-probs and entropies.
            train_draft: False leaves the draft out.

        Raises:
            BatchError: on every rank, when a batch is malformed or ranks disagree.
            ChannelError: a peer died, stopped, or missed a deadline.
        """
        with self._call():
            agreed = self._meet(
                "step",
                [batch],
                {
                    "policy_loss": policy_loss is not None,
                    "denominator": denominator,
                    "temperature": temperature,
                    "draft_denominator": draft_denominator,
                    "draft_weight": draft_weight,
                    "train_draft": train_draft,
                },
            )
            divisor = float(agreed.valid_tokens) if denominator is None else float(denominator)
            count = (
                agreed.draft_count if draft_denominator is None else _as_count(draft_denominator)
            )
            weight = self.plan.draft_weight if draft_weight is None else float(draft_weight)
            trains_draft = train_draft and self.draft is not None
            options = StepOptions(
                policy_loss=policy_loss,
                policy_scale=1.0 / divisor if divisor else 0.0,
                draft_scale=None if count is None else _scale(count, weight),
                target_grad=policy_loss is not None,
                run_draft=trains_draft,
                draft_grad=trains_draft,
                temperature=float(temperature),
            )
            return self._train(agreed, options, divisor, count, weight)

    def _train(
        self,
        agreed: Agreement,
        options: StepOptions,
        divisor: float,
        count: Tensor | None,
        weight: float,
    ) -> StepResult:
        micro_batches = self._caller.micro_batches(agreed.batches[0], agreed.num_micro_batches)
        on = {"policy": options.target_grad, "draft": options.run_draft}
        groups = [name for name, trains in on.items() if trains]
        self._ledger.begin()
        try:
            run = self._caller.run(micro_batches, options, backward=bool(groups))
            totals = self._collect(run)
            if count is None:
                count = totals.draft_count
                self._apply_deferred(run, None if count is None else _scale(count, weight))
            self._ledger.finish(groups)
        except BaseException:
            self._ledger.restore()
            raise
        self._steps += 1
        policy, named = policy_metrics(totals, divisor)
        draft, metrics = draft_metrics(totals, count)
        metrics["step/policy_tokens"] = float(agreed.valid_tokens)
        return StepResult(policy, draft, {**metrics, **named})

    def counts(self, batches: PackedBatch | Sequence[PackedBatch]) -> tuple[int, Any]:
        """Global valid tokens and draft rows of several batches: denominators for accumulated steps.

        Returns:
            An int, and an int or a list with one a step of the draft (None when it depends on activations).
        """
        with self._call():
            listed: list[Any] = list(batches) if isinstance(batches, (list, tuple)) else [batches]
            agreed = self._meet("counts", listed, {"batches": len(listed)})
            draft = agreed.draft_count
            if self.draft is None:
                return agreed.valid_tokens, 0
            if draft is None:
                return agreed.valid_tokens, None
            return agreed.valid_tokens, draft.tolist()

    def logprobs(self, batch: PackedBatch, temperature: float = 1.0) -> Tensor:
        """Log-prob of every token given the earlier ones of its document, [T] on every rank; no gradient.

        Runs step's own graph and layout: with unchanged weights ``exp(step's - these)`` is exactly 1.
        """
        with self._call():
            agreed = self._meet("logprobs", [batch], {"temperature": temperature})
            micro_batches = self._caller.micro_batches(agreed.batches[0], agreed.num_micro_batches)
            options = StepOptions(keep_tokens=True, temperature=float(temperature))
            run = self._caller.run(micro_batches, options, backward=False)
            return self._spread(micro_batches, run, agreed.batches[0].num_tokens)

    def evaluate(self, batch: PackedBatch) -> Evaluation:
        """Draft loss and predicted acceptance on a batch; no gradient, nothing changes."""
        if self.draft is None:
            raise ConfigError("evaluate measures the draft, and this model has none")
        with self._call():
            agreed = self._meet("evaluate", [batch], {})
            micro_batches = self._caller.micro_batches(agreed.batches[0], agreed.num_micro_batches)
            run = self._caller.run(micro_batches, StepOptions(run_draft=True), backward=False)
            totals = self._collect(run)
            count = agreed.draft_count if agreed.draft_count is not None else totals.draft_count
            loss, metrics = draft_metrics(totals, count)
            accepted = totals.stats.get("acceptance")
            shares = ratio(accepted, count).reshape(-1).tolist() if accepted is not None else []
            return Evaluation(loss, shares, metrics)

    def __call__(self, batch: PackedBatch, temperature: float = 1.0) -> TokenOutputs:
        """Differentiable log-probs, entropies and draft loss of a whole batch, for loops that own the loss.

        Call `finalize_grads` after ``backward``. Needs pp == 1.
        """
        if self.plan.pp > 1:
            raise ConfigError(
                f"model(batch) needs pp == 1, the plan has pp={self.plan.pp}; use step(batch, policy_loss)"
            )
        with self._call():
            agreed = self._meet("forward", [batch], {"temperature": temperature})
            micro_batches = self._caller.micro_batches(agreed.batches[0], agreed.num_micro_batches)
            return differentiable_rows(
                self._caller,
                self._world,
                agreed,
                micro_batches,
                temperature=float(temperature),
                draft=self.draft is not None,
                begin=self._ledger.begin,
                deadline_s=self.plan.timeout_s,
            )

    def finalize_grads(self) -> None:
        """Sum the gradients of ``model(batch)`` over cp and dp, as `step` does itself."""
        with self._call():
            if not self._ledger.pending:
                raise ConfigError(
                    "finalize_grads found no new gradients: call backward() on a loss of model(batch) first"
                )
            self._ledger.finish(("policy", "draft"))
            self._steps += 1

    def param_groups(
        self, policy: Mapping[str, Any] | None = None, draft: Mapping[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        """Optimizer groups of this rank's parameters: the policy's, then the draft's when there is one.

        A rank whose stage holds no draft parameters gets an empty group, so that groups line up on all ranks.
        """
        groups = [{"params": self._owned.policy, **(policy or {}), "name": "policy"}]
        if self.draft is not None:
            groups.append({"params": self._owned.draft, **(draft or {}), "name": "draft"})
        return groups

    def clip_grad_norm_(
        self, policy: float | None = None, draft: float | None = None
    ) -> dict[str, float]:
        """Clip the two groups, each to its own norm over all stages; None only measures.

        Returns:
            {"policy": norm, "draft": norm} before clipping, the same on every rank.
        """
        if self._ledger.pending:
            raise ConfigError(
                "gradients of model(batch) are not summed over ranks yet; call finalize_grads() first"
            )
        width = self.plan.dp * self.plan.cp
        stages = {stage * width: stage for stage in range(self.plan.pp)}
        with self._call():
            return clip(
                self._owned,
                self._world.control,
                stages,
                {"policy": policy, "draft": draft},
                deadline_s=self.plan.entry_timeout_s,
            )

    def export_weights(
        self, which: str, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (public checkpoint name, tensor) of "policy" or "draft"; exhaust it on every rank."""
        if which not in ("policy", "draft") or (which == "draft" and self.draft is None):
            raise ConfigError(
                f"export_weights takes 'policy'{'' if self.draft is None else ' or draft'}, found {which!r}"
            )
        self._check_open()
        module = self.target if which == "policy" else self.draft
        assert module is not None
        owners = self._owners.policy if which == "policy" else self._owners.draft
        return weights.export_weights(module, owners, self._world.fabrics["pp"], dtype)

    def state_dict(self) -> dict[str, Any]:
        """This rank's tensors by global name, the step and the random state; no pickled objects."""
        return weights.state_dict(
            self.target,
            self.draft,
            self._caller.stage,
            self._owners.policy,
            self._owners.draft,
            self._steps,
            self._world.rank,
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave, into the same parameters."""
        self._steps = weights.load_state_dict(
            state,
            self.target,
            self.draft,
            self._caller.stage,
            self._owners.policy,
            self._owners.draft,
            self._world.rank,
        )

    def close(self) -> None:
        """Free channels, threads and own groups; idempotent."""
        if not self._closed:
            self._closed = True
            self._caller.close()
            self._world.close()

    def _meet(
        self, call: str, batches: Sequence[PackedBatch], arguments: dict[str, Any]
    ) -> Agreement:
        return self._entry.meet(call, batches, arguments)

    def _collect(self, run: StageRun) -> Totals:
        last = self._caller.stage == self.plan.num_stages - 1
        return collect(self._world, run.sums, is_last=last, deadline_s=self.plan.timeout_s)

    def _apply_deferred(self, run: StageRun, scale: Tensor | None) -> None:
        for g, grads in run.deferred.items():
            assert scale is not None
            factor = float(scale.reshape(-1)[g])
            for parameter, grad in zip(self._owned.draft, grads, strict=True):
                if grad is not None:
                    scaled = grad * factor
                    parameter.grad = (
                        scaled if parameter.grad is None else parameter.grad.add_(scaled)
                    )

    def _spread(
        self, micro_batches: Sequence[MicroBatch], run: StageRun, num_tokens: int
    ) -> Tensor:
        """Log-probs of the last stage, in the batch's order, on every stage."""
        pp = self._world.fabrics["pp"]
        last = pp.size - 1
        dtype = (
            torch.float64
            if next(run.graphs.policy.parameters()).dtype == torch.float64
            else torch.float32
        )
        if pp.rank != last:
            return pp.recv((num_tokens,), dtype, last)
        out = torch.zeros(num_tokens, dtype=dtype, device=self._world.device)
        for mb, micro_batch in enumerate(micro_batches):
            out[micro_batch.batch.rows] = run.tokens[mb][0].to(dtype)
        for rank in range(last):
            pp.send(out, rank)
        pp.flush()
        return out

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("this model was closed; call parallelize again")

    @contextlib.contextmanager
    def _call(self) -> Iterator[None]:
        """Tell all peers about an error that they cannot know of, so that nobody waits for this rank."""
        self._check_open()
        self._world.control.check()
        shared: BaseException | None = None
        try:
            yield
        except SharedFailure as failure:
            shared = failure.error
        except (BatchError, ConfigError):
            raise  # agreed on by all ranks: the next step can work
        except BaseException as error:
            self._world.control.fail(error)
            raise
        if shared is not None:  # raised out here, it keeps the context that it had
            raise shared


def _vocab_size(target: nn.Module) -> int:
    embedding: Callable[[], Any] = target.get_input_embeddings  # type: ignore[assignment]
    head: Callable[[], Any] = target.get_output_embeddings  # type: ignore[assignment]
    return int(min(embedding().weight.shape[0], head().weight.shape[0]))


def _as_count(value: Any) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64)


def _scale(count: Tensor, weight: float) -> Tensor:
    safe = torch.where(count == 0, torch.ones_like(count), count)
    return torch.where(count == 0, torch.zeros_like(count), weight / safe)
