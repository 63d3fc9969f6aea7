"""The bound model: one rank's part of a joint training step, driven by any training loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Never

import torch
from torch import Tensor

from spec_compile.batch import PackedBatch
from spec_compile.contract import TokenOutputs
from spec_compile.errors import ConfigError

from .arguments import checked_limit, frozen_refusal, named_groups_error
from .bound import BoundModel
from .differentiable import differentiable_rows
from .entry import Agreement
from .failure import SharedFailure
from .gradients import clip, squared_norms
from .modes import inference_refusal
from .policy_loss import PolicyLoss
from .results import (
    Evaluation,
    StepResult,
    Totals,
    acceptance,
    collect,
    draft_metrics,
    layout_metrics,
    policy_metrics,
)
from .stage_run import StageRun, StepOptions


class ParallelModel(BoundModel):
    """A target and a draft bound to one rank; made by ``spec_compile.parallelize``.

    All methods but `param_groups`, `state_dict`, `load_state_dict` and `close` are collective: every
    rank calls them in the same order with the same arguments. A call that a rank cannot take raises on
    every rank before anything has changed, and the next call works. Calls own their precision (a
    surrounding autocast is off inside) and their gradient mode (a surrounding no_grad matters to
    ``model(batch)`` alone).
    """

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
            policy_loss: sum over one micro-batch's rows, optionally with named sums; called for every
                micro-batch, also one without a row. None trains the draft alone.
            denominator: what the policy's sums are divided by; None: the global number of valid tokens.
            draft_denominator: replaces the draft's global count, a number or one a step.
            draft_weight: factor on the draft's gradients; None: the plan's.
            temperature: of the policy's log-probs and entropies.
            train_draft: False leaves the draft out.

        Raises:
            BatchError: on every rank, when a batch is malformed or ranks disagree.
            ConfigError: an argument is not allowed, `finalize_grads` is due, a parameter was unfrozen since
                ``parallelize``, or ``policy_loss`` returned something else than a finite sum over its
                rows, or was given for a wholly frozen target.
            ChannelError: a peer died, stopped, or missed a deadline.
        """
        arguments = {
            "policy_loss": policy_loss,
            "denominator": denominator,
            "temperature": temperature,
            "draft_denominator": draft_denominator,
            "draft_weight": draft_weight,
            "train_draft": train_draft,
        }
        refusal = (
            inference_refusal("step") or self._ledger.refusal("step") or self._flags.refusal("step")
        )
        if policy_loss is not None and refusal is None:
            refusal = frozen_refusal("step", self.target)
        with self._call(grad=True):
            agreed = self._entry.meet("step", [batch], arguments, refusal, self._flags)
            trains_draft = agreed.arguments["train_draft"] and self.draft is not None
            divisor = agreed.policy_divisor()
            count = agreed.draft_divisor() if trains_draft else None
            weight = agreed.arguments["draft_weight"]
            weight = self.plan.draft_weight if weight is None else weight
            options = StepOptions(
                policy_loss=policy_loss,
                num_micro_batches=agreed.num_micro_batches,
                policy_scale=1.0 / divisor if divisor else 0.0,
                draft_scale=None if count is None else _scale(count, weight),
                target_grad=policy_loss is not None,
                run_draft=trains_draft,
                draft_grad=trains_draft,
                temperature=agreed.arguments["temperature"],
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
        on = {"policy": options.target_grad, "draft": options.run_draft}
        groups = [name for name, trains in on.items() if trains]
        self._ledger.begin()
        try:
            run = self._run(agreed, options, backward=bool(groups))
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
        metrics |= layout_metrics(totals.balance)
        return StepResult(policy, draft, {**metrics, **named})

    def counts(self, batches: PackedBatch | Sequence[PackedBatch]) -> tuple[int, Any]:
        """Global valid tokens and draft rows of several batches: denominators for accumulated steps.

        Returns:
            An int, and a number or a list with one a step of the draft (None when it depends on
            activations); ints where integral, zeros for no batches.
        """
        with self._call():
            listed: list[Any] = list(batches) if isinstance(batches, (list, tuple)) else [batches]
            agreed = self._entry.meet("counts", listed, {"batches": len(listed)})
            if self.draft is None:
                return agreed.valid_tokens, 0
            if agreed.draft_count is None:
                return agreed.valid_tokens, None
            return agreed.valid_tokens, _integral(agreed.draft_count.tolist())

    def logprobs(self, batch: PackedBatch, temperature: float = 1.0) -> Tensor:
        """Log-prob of every token given the earlier ones of its document, [T] on every rank; no gradient.

        Runs step's own graph and layout: with unchanged weights ``exp(step's - these)`` is exactly 1.
        """
        with self._call():
            agreed = self._entry.meet("logprobs", [batch], {"temperature": temperature})
            heat = agreed.arguments["temperature"]
            run = self._run(agreed, StepOptions(keep_tokens=True, temperature=heat), backward=False)
            return self._caller.spread_logprobs(
                run.micro_batches, run, agreed.batches[0].num_tokens
            )

    def evaluate(self, batch: PackedBatch) -> Evaluation:
        """Draft loss and predicted acceptance on a batch; no gradient, nothing changes."""
        self._check_open()
        if self.draft is None:
            raise ConfigError("evaluate measures the draft, and this model has none")
        with self._call():
            agreed = self._entry.meet("evaluate", [batch], {})
            run = self._run(agreed, StepOptions(run_draft=True), backward=False)
            totals = self._collect(run)
            count = agreed.draft_count if agreed.draft_count is not None else totals.draft_count
            loss, metrics = draft_metrics(totals, count)
            return Evaluation(loss, acceptance(totals, count), metrics)

    def __call__(self, batch: PackedBatch, temperature: float = 1.0) -> TokenOutputs:
        """Differentiable log-probs, entropies and draft loss of a whole batch, for loops that own the loss.

        Call `finalize_grads` after the last ``backward`` before clipping, an optimizer's step, or `step`;
        until then further ``model(batch)`` accumulate. Needs pp == 1. Under ``torch.no_grad()`` the rows
        carry no gradient, as with any module.
        """
        self._check_open()
        if self.plan.pp > 1:
            raise ConfigError(
                f"model(batch) needs pp == 1, the plan has pp={self.plan.pp}; use step(batch, policy_loss)"
            )
        arguments = {"temperature": temperature, "grad": torch.is_grad_enabled()}
        refusal = inference_refusal("model(batch)")
        flags = self._flags if arguments["grad"] else None
        if flags is not None and refusal is None:
            refusal = flags.refusal("model(batch)")
        with self._call(grad=None):
            agreed = self._entry.meet("forward", [batch], arguments, refusal, flags)
            return differentiable_rows(
                self._caller,
                self._world,
                agreed,
                self._caller.micro_batches(agreed.batches[0], agreed.num_micro_batches),
                temperature=agreed.arguments["temperature"],
                draft=self.draft is not None,
                begin=self._ledger.begin,
                deadline_s=self.plan.timeout_s,
            )

    def finalize_grads(self) -> None:
        """Sum the gradients of ``model(batch)`` over cp and dp, as `step` does itself.

        A rank whose loss reached fewer parameters than its peers', or none, counts as zero there.
        """
        with self._call():
            replies = self._entry.exchange(
                "finalize_grads",
                lambda: {"pending": self._ledger.pending, "present": self._ledger.present()},
                ConfigError,
            )
            if not any(reply["pending"] for reply in replies):
                raise SharedFailure(
                    ConfigError(
                        "finalize_grads found no new gradients: call backward() on a loss of model(batch) first"
                    )
                )
            self._ledger.complete(
                [any(one) for one in zip(*(r["present"] for r in replies), strict=True)]
            )
            self._ledger.finish(("policy", "draft"))
            self._steps += 1

    def clip_grad_norm_(
        self, *unnamed: Never, policy: float | None = None, draft: float | None = None
    ) -> dict[str, float]:
        """Clip the two groups, each to its own norm over all stages.

        Args:
            unnamed: refused; it would clip one of the groups only.
            policy: largest norm, above 0; infinity clips nothing, None only measures.
            draft: the same for the draft.

        Returns:
            {"policy": norm, "draft": norm} before clipping, the same on every rank.

        Raises:
            ConfigError: on every rank, when a limit is no number above 0, ranks have different ones, or
                `finalize_grads` is due.
        """

        def describe() -> dict[str, Any]:
            if unnamed:
                raise named_groups_error(unnamed)
            refusal = self._ledger.refusal("clip_grad_norm_")
            if refusal is not None:
                raise refusal
            limits = {"policy": policy, "draft": draft}
            checked = {name: checked_limit(name, limit) for name, limit in limits.items()}
            return {"limits": checked, "squares": squared_norms(self._owned)}

        with self._call():
            replies = self._entry.exchange("clip_grad_norm_", describe, ConfigError)
            limits = replies[self._world.rank]["limits"]
            for rank, reply in enumerate(replies):
                if reply["limits"] != limits:
                    raise SharedFailure(
                        ConfigError(
                            f"ranks must clip to the same norms; rank {rank} has {reply['limits']}, rank "
                            f"{self._world.rank} has {limits}"
                        )
                    )
            norms: dict[str, float] = {}
            # one rank a stage: its gradients are whole
            stages = replies[:: self.plan.dp * self.plan.cp]
            for name, limit in limits.items():
                norms[name] = sum(reply["squares"][name] for reply in stages) ** 0.5
                if limit is not None:
                    clip(self._owned, name, norms[name], limit)
            return norms

    def _run(self, agreed: Agreement, options: StepOptions, *, backward: bool) -> StageRun:
        micro_batches = self._caller.micro_batches(agreed.batches[0], agreed.num_micro_batches)
        return self._caller.run(micro_batches, options, backward=backward)

    def _collect(self, run: StageRun) -> Totals:
        is_last = self._caller.last.is_last
        balance = self._caller.balance(run.micro_batches)
        return collect(
            self._world, run.sums, balance, is_last=is_last, deadline_s=self.plan.timeout_s
        )

    def _apply_deferred(self, run: StageRun, scale: Tensor | None) -> None:
        for g, grads in run.deferred.items():
            assert scale is not None
            factor = float(scale.reshape(-1)[g])
            for parameter, grad in zip(run.draft_parameters, grads, strict=True):
                if grad is not None:
                    scaled = grad * factor
                    parameter.grad = (
                        scaled if parameter.grad is None else parameter.grad.add_(scaled)
                    )


def _integral(count: Any) -> Any:
    """Whole floats as ints, in a list too."""
    if isinstance(count, list):
        return [_integral(one) for one in count]
    return int(count) if count == int(count) else count


def _scale(count: Tensor, weight: float) -> Tensor:
    safe = torch.where(count == 0, torch.ones_like(count), count)
    return torch.where(count == 0, torch.zeros_like(count), weight / safe)
