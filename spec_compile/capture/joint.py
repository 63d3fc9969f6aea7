"""Target, policy head and draft as one module over one packed row: the thing that is traced."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from spec_compile.contract import DraftInputs, DraftOutput, TeacherView
from spec_compile.errors import CaptureError
from spec_compile.ir import ops

from .attention import packed_row
from .call_watch import CallWatch, Learned
from .flex_spellings import flex_spellings
from .row_spellings import RowSpellings
from .target import TargetView

INPUTS = ("tokens", "positions", "document", "index", "loss_mask", "temperature")


class JointModule(nn.Module):
    """Run target and draft on one packed row of ``T`` tokens, dense, as one device would."""

    def __init__(self, target: TargetView, draft: nn.Module | None, taps: tuple[int, ...]) -> None:
        super().__init__()
        self.target = target.model
        self.draft = draft
        self._view = target
        self._taps = taps
        self._residuals: dict[int, Tensor] = {}
        self.learned = Learned()
        target.hook_boundaries(self._residuals)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        document: Tensor,
        index: Tensor,
        loss_mask: Tensor,
        temperature: Tensor,
        anchors: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Return log-probs [T], entropies [T] and, with a draft, loss_sum, count and its stats.

        Row ``t`` of the first two belongs to token ``t + 1``: ids are shifted here, on the whole row.
        """
        self._residuals.clear()
        watch = CallWatch(tokens.shape[0], self.learned)
        with packed_row(document, index), watch:
            hidden = self._view.run(tokens, positions)
            labels = torch.where(
                ops.shift(torch.ones_like(loss_mask), 1, document),
                ops.shift(tokens, 1, document),
                -1,
            )
            head = self._view.head.weight
            logprobs, entropy = ops.declared_token_logprobs(hidden, head, labels, temperature)
            if self.draft is None:
                return logprobs, entropy
            table = self._view.embedding.weight
            features = [self._residuals[i].detach() for i in self._taps]
            inputs = _inputs_that_tell(self.learned)(
                features=torch.cat(features, -1) if features else hidden.detach()[:, :0],
                tokens=tokens,
                positions=positions,
                document=document,
                index=index,
                loss_mask=loss_mask,
                embedding=lambda ids: nn.functional.embedding(ids, table.detach()),
                teacher=TeacherView(hidden=hidden.detach(), weight=head.detach()),
                anchors=anchors,
            )
            with flex_spellings(self.draft), RowSpellings():
                output = self.draft(inputs)
            watch.look_for_conditions()
        names, stats = _check_output(output, self.draft)
        self.learned.stats = names
        return logprobs, entropy, output.loss_sum, output.count, *stats


def _inputs_that_tell(learned: Learned) -> type[DraftInputs]:
    """Make a class that remembers a draft's reading anchors where there are none: what follows may puzzle.

    Its values have the fields of the contract and nothing else, so that a draft may copy them.
    """

    class Inputs(DraftInputs):
        def __getattribute__(self, name: str) -> Any:
            value = super().__getattribute__(name)
            if name == "anchors" and value is None:
                learned.misses_anchors = True
            return value

    return Inputs


def _check_output(output: Any, draft: nn.Module) -> tuple[tuple[str, ...], list[Tensor]]:
    name = type(draft).__name__
    if not isinstance(output, DraftOutput):
        raise CaptureError(
            f"{name}.forward must return a DraftOutput, found {type(output).__name__}"
        )
    if not isinstance(output.stats, dict) or not all(isinstance(key, str) for key in output.stats):
        raise CaptureError(
            f"{name}: DraftOutput.stats must be a dict of named sums, found {output.stats!r}; leave it out for none"
        )
    for key, value in {"loss_sum": output.loss_sum, "count": output.count, **output.stats}.items():
        if not isinstance(value, Tensor):
            raise CaptureError(
                f"{name}: {key} must be a tensor, found {type(value).__name__}; return the sum of a tensor over rows "
                "(a Python number would be a constant of the graph)"
            )
        if any(isinstance(size, torch.SymInt) for size in value.shape):
            raise CaptureError(
                f"{name}: {key} has one entry a row, found {tuple(value.shape)}; return its sum over rows"
            )
    shape = tuple(output.loss_sum.shape)
    if len(shape) > 1 or tuple(output.count.shape) != shape:
        raise CaptureError(
            f"{name}: loss_sum and count must be scalars or vectors [G] of equal length, found "
            f"{shape} and {tuple(output.count.shape)}; sum over rows, and over all else that is not a step or slot"
        )
    if not output.loss_sum.is_floating_point():
        raise CaptureError(
            f"{name}: loss_sum must be a floating point tensor, found {output.loss_sum.dtype}; did it change places "
            "with count?"
        )
    if output.count.requires_grad:
        raise CaptureError(
            f"{name}: count carries a gradient, which the draft loss, loss_sum / count, has no part for: weights that "
            "the draft learns would be pushed one way alone; return count.detach(), or divide inside loss_sum"
        )
    for key, value in output.stats.items():
        if tuple(value.shape) not in ((), shape):
            raise CaptureError(
                f"{name}: stats[{key!r}] must be a scalar or like loss_sum {shape}, found {tuple(value.shape)}; "
                "return its sum over rows"
            )
    return tuple(output.stats), list(output.stats.values())
