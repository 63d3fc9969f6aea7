"""One stage of one step: runs the lowered graphs of this rank micro-batch by micro-batch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from .context import RunContext, bind
from .fabric import Fabric
from .micro_batch import MicroBatch
from .policy_loss import PolicyLoss, PolicyOutcome, call_policy_loss
from .readback import Readback
from .split_backward import WeightGradient
from .taps import TapChannels
from .timeline import span
from .token_outputs import align, gather, token_outputs, unalign


@dataclass(frozen=True)
class StageGraphs:
    """What this rank runs."""

    stage: int
    num_stages: int
    policy: GraphModule
    """The stage's graph; on the last stage without the draft."""
    draft: GraphModule | None
    """The draft's part, on the last stage only."""
    stat_names: tuple[str, ...]
    hidden_width: int
    hidden_dtype: torch.dtype
    splits_weights: bool = False
    """Whether the policy's graph can leave gradients of weights for later."""

    @property
    def is_last(self) -> bool:
        """Whether this stage ends the pipeline."""
        return self.stage == self.num_stages - 1


@dataclass
class StepOptions:
    """What one call of the model asks of a stage."""

    policy_loss: PolicyLoss | None = None
    num_micro_batches: int = 0
    """Micro-batches that the policy loss is called for; those after them only fill the schedule."""
    policy_scale: float = 1.0
    """Factor on the policy's gradients: 1 / denominator."""
    draft_scale: Tensor | None = None
    """Factor(s) on the draft's gradients, [] or [G]: weight / count; None: unknown until all counts are."""
    target_grad: bool = False
    run_draft: bool = False
    draft_grad: bool = False
    keep_tokens: bool = False
    """Keep log-probs and entropies [T] of every micro-batch."""
    temperature: float = 1.0


@dataclass
class Sums:
    """What this rank's micro-batches add up to, on its way to the host."""

    policy: list[PolicyOutcome] = field(default_factory=list)
    tokens: int = 0
    """Tokens that the policy loss has seen."""
    draft: list[Readback] = field(default_factory=list)
    """Loss and count, then the stats in the order of ``stat_names``."""
    stat_names: tuple[str, ...] = ()
    error: Exception | None = None
    """What the user's policy loss raised; the schedule runs on so that no peer waits."""


class StageRun:
    """A `StageProgram` over the micro-batches of one call."""

    def __init__(
        self,
        graphs: StageGraphs,
        micro_batches: Sequence[MicroBatch],
        options: StepOptions,
        fabrics: Mapping[str, Fabric],
        taps: TapChannels | None,
        draft_parameters: Sequence[Tensor] = (),
        run_options: Mapping[str, str] | None = None,
    ) -> None:
        self.graphs, self.micro_batches, self.options = graphs, micro_batches, options
        self.fabrics, self.taps = fabrics, taps
        self._run_options = dict(run_options or {})
        self.sums = Sums(stat_names=graphs.stat_names)
        self.tokens: dict[int, tuple[Tensor, Tensor]] = {}
        self.deferred: dict[int, list[Tensor | None]] = {}
        """Unscaled gradients of `draft_parameters` by step, while the counts are unknown."""
        self.draft_parameters = [p for p in draft_parameters if p.requires_grad]
        """Those not frozen since they were bound."""
        self._saved: dict[int, tuple[Tensor | None, list[Tensor], list[Tensor | None]]] = {}
        self._crossing: dict[int, list[Tensor]] = {}
        self._later: dict[int, list[WeightGradient]] = {}
        device = next(graphs.policy.parameters()).device
        # filled there: a copy would wait for the device
        self._temperature = torch.full(
            (), float(options.temperature), dtype=torch.float64, device=device
        )
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @property
    def hidden_dtype(self) -> torch.dtype:
        """Type of the activations between stages."""
        return self.graphs.hidden_dtype

    def hidden_shape(self, mb: int) -> tuple[int, ...]:
        """Shape of the activations between stages."""
        return (1, self.micro_batches[mb].num_rows, self.graphs.hidden_width)

    def forward(self, mb: int, hidden: Tensor | None) -> Tensor | None:
        """Run the stage's forward; on the last stage also the policy loss and its token gradients."""
        grad = self.options.target_grad
        if grad and self.graphs.splits_weights:
            self._later[mb] = []
        with self._bound(mb), torch.set_grad_enabled(grad):
            inputs = self._inputs(mb)
            if hidden is not None:
                hidden = hidden.detach().requires_grad_(grad)
                inputs["hidden"] = hidden
            outputs = list(self.graphs.policy(**inputs))
        if not self.graphs.is_last:
            if grad:
                self._saved[mb] = (hidden, outputs, [])
            sent: Tensor = outputs[0].detach()
            return sent
        logprobs, entropy, *crossing = outputs
        if self.options.run_draft:
            self._crossing[mb] = [x.detach() for x in crossing]
        if self.options.keep_tokens:
            micro_batch, cp = self.micro_batches[mb], self.fabrics["cp"]
            self.tokens[mb] = (gather(micro_batch, cp, logprobs), gather(micro_batch, cp, entropy))
        if grad:
            grads = self._policy_gradients(mb, logprobs, entropy)
            self._saved[mb] = (hidden, [logprobs, entropy], grads)
        if not grad and self.options.run_draft and not self.options.draft_grad:
            self._run_draft(mb)
        return None

    def backward(self, mb: int, grad: Tensor | None, *, weights: bool = True) -> Tensor | None:
        """Run the stage's backward, and on the last stage the draft's forward and backward."""
        result: Tensor | None = None
        if self.options.target_grad:
            hidden, outputs, grads = self._saved.pop(mb)
            with self._bound(mb):
                _backward(outputs, grads if grad is None else [grad])
            result = None if hidden is None else hidden.grad
        if weights:
            self.backward_weights(mb)
        if self.graphs.is_last and self.options.run_draft:
            self._run_draft(mb)
        return result

    def backward_weights(self, mb: int) -> None:
        """Add the gradients of the stage's linear layers, where `backward` has left them."""
        for made_of in self._later.pop(mb, ()):
            made_of.add()

    def _bound(self, mb: int) -> Any:
        taps = self.taps if self.options.run_draft else None
        later = self._later.get(mb)
        return bind(RunContext(self.fabrics, taps, mb, later, options=self._run_options))

    def _inputs(self, mb: int) -> dict[str, Tensor]:
        return {**self.micro_batches[mb].graph_inputs(), "temperature": self._temperature}

    def _policy_gradients(self, mb: int, logprobs: Tensor, entropy: Tensor) -> list[Tensor | None]:
        """Call the user's loss on whole documents and take this rank's slice of its gradients.

        Zeros of log-probs stand for no gradient at all: every rank runs the backward.
        """
        micro_batch, cp, options = self.micro_batches[mb], self.fabrics["cp"], self.options
        both = cp.all_gather(torch.stack([logprobs.detach(), entropy.detach()]))
        whole = [align(micro_batch, both[:, i]).requires_grad_() for i in range(2)]
        nothing: list[Tensor | None] = [torch.zeros_like(logprobs), None]
        if mb >= options.num_micro_batches or self.sums.error is not None:
            return nothing
        assert options.policy_loss is not None
        try:
            rows = token_outputs(micro_batch, whole[0], whole[1])
            outcome = call_policy_loss(options.policy_loss, rows)
        except (
            Exception
        ) as error:  # every peer must finish the schedule; raised at its end on all ranks
            self.sums.error = error
            return nothing
        self.sums.policy.append(outcome)
        self.sums.tokens += micro_batch.batch.num_tokens
        local = [
            None if value is None else unalign(micro_batch, value, cp.rank) * options.policy_scale
            for value in outcome.gradients
        ]
        return nothing if all(value is None for value in local) else local

    def _run_draft(self, mb: int) -> None:
        graph = self.graphs.draft
        assert graph is not None
        crossing = {f"from_policy_{i}": x for i, x in enumerate(self._crossing.pop(mb))}
        recorded = span("draft", self.graphs.stage, mb)
        with recorded, self._bound(mb), torch.set_grad_enabled(self.options.draft_grad):
            made = graph(**self._inputs(mb), **crossing)
            sums = self.micro_batches[mb].draft_sums(made)
            self.sums.draft.append(Readback(sums))
            loss_sum = sums[0]
            if self.options.draft_grad and loss_sum.requires_grad:
                self._draft_backward(loss_sum)
                if not self.micro_batches[mb].batch.num_tokens:
                    self._add_zero_gradients(made[0])
        if self.taps is not None:
            self.taps.release(mb)

    def _draft_backward(self, loss_sum: Tensor) -> None:
        scale = self.options.draft_scale
        if scale is not None:
            # a copy that is waited for would wait for the draft's forward
            grad = scale.to(loss_sum, non_blocking=True).expand_as(loss_sum)
            torch.autograd.backward([loss_sum], [grad])
            return
        parts = loss_sum.reshape(-1)
        for g in range(parts.shape[0]):
            grads = torch.autograd.grad(
                parts[g],
                self.draft_parameters,
                retain_graph=g + 1 < parts.shape[0],
                allow_unused=True,
            )
            held = self.deferred.get(g, [None] * len(grads))
            self.deferred[g] = [
                _add(a, b) if b is not None else a for a, b in zip(held, grads, strict=True)
            ]

    def _add_zero_gradients(self, loss_sum: Tensor) -> None:
        """Let a rank without tokens take part in the sums over ranks: 0, whatever its graph divides by."""
        used = torch.autograd.grad(loss_sum.sum(), self.draft_parameters, allow_unused=True)
        for parameter, grad in zip(self.draft_parameters, used, strict=True):
            if grad is not None and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


def _backward(outputs: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
    """Backward through the outputs that depend on something trainable: a frozen first stage has none."""
    given = zip(outputs, grads, strict=True)
    pairs = [(x, g) for x, g in given if x.requires_grad and g is not None]
    if pairs:
        torch.autograd.backward([x for x, _ in pairs], [g for _, g in pairs])


def _add(total: Tensor | None, value: Tensor) -> Tensor:
    value = value.detach()
    return value.clone() if total is None else total + value
