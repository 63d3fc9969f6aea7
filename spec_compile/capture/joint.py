"""Target, policy head and draft as one module over one packed row: the thing that is traced."""

from __future__ import annotations

import traceback
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from spec_compile.contract import DraftInputs, DraftOutput, TeacherView
from spec_compile.errors import CaptureError
from spec_compile.ir import ops

from .attention import packed_row
from .target import TargetView

INPUTS = ("tokens", "positions", "document", "index", "loss_mask", "temperature")


class TracedNames:
    """What tracing learned; an object of its own, because torch.export undoes changes of a module's attributes."""

    def __init__(self) -> None:
        self.stats: tuple[str, ...] = ()


class JointModule(nn.Module):
    """Run target and draft on one packed row of ``T`` tokens, dense, as one device would."""

    def __init__(self, target: TargetView, draft: nn.Module | None, taps: tuple[int, ...]) -> None:
        super().__init__()
        self.target = target.model
        self.draft = draft
        self._view = target
        self._taps = taps
        self._residuals: dict[int, Tensor] = {}
        self.traced = TracedNames()
        target.hook_boundaries(self._residuals)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        document: Tensor,
        index: Tensor,
        loss_mask: Tensor,
        temperature: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return log-probs [T], entropies [T] and, with a draft, loss_sum, count and its stats.

        Row ``t`` of the first two belongs to token ``t + 1``: ids are shifted here, on the whole row.
        """
        self._residuals.clear()
        with packed_row(document, index), _RefuseWhatExportLoses():
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
            output = self.draft(
                DraftInputs(
                    features=torch.cat(features, -1) if features else hidden.detach()[:, :0],
                    tokens=tokens,
                    positions=positions,
                    document=document,
                    index=index,
                    loss_mask=loss_mask,
                    embedding=lambda ids: nn.functional.embedding(ids, table.detach()),
                    teacher=TeacherView(hidden=hidden.detach(), weight=head.detach()),
                )
            )
        names, stats = _check_output(output, self.draft)
        self.traced.stats = names
        return logprobs, entropy, output.loss_sum, output.count, *stats


def _check_output(output: Any, draft: nn.Module) -> tuple[tuple[str, ...], list[Tensor]]:
    name = type(draft).__name__
    if not isinstance(output, DraftOutput):
        raise CaptureError(
            f"{name}.forward must return a DraftOutput, found {type(output).__name__}"
        )
    for key, value in {"loss_sum": output.loss_sum, "count": output.count, **output.stats}.items():
        if any(isinstance(size, torch.SymInt) for size in value.shape):
            raise CaptureError(
                f"{name}: {key} has one entry a row, found {tuple(value.shape)}; return its sum over rows"
            )
    shape = tuple(output.loss_sum.shape)
    if len(shape) > 1 or tuple(output.count.shape) != shape:
        raise CaptureError(
            f"{name}: loss_sum and count must be scalars or vectors [G] of equal length, found "
            f"{shape} and {tuple(output.count.shape)}"
        )
    for key, value in output.stats.items():
        if tuple(value.shape) not in ((), shape):
            raise CaptureError(
                f"{name}: stats[{key!r}] must be a scalar or like loss_sum, found {tuple(value.shape)}"
            )
    return tuple(output.stats), list(output.stats.values())


class _RefuseWhatExportLoses(TorchFunctionMode):
    """Say plainly what torch.export does silently, or reports far from its cause.

    It drops a ``no_grad`` inside ``autocast`` (parameters would train), and ``len`` of rows or a loop over
    them makes their number a constant.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.__len__, Tensor.unbind, torch.unbind) and _over_rows(args, kwargs or {}):
            raise CaptureError(
                f"{_user_line()}\n  len() of rows, or a Python loop over them, fixes their number; write "
                "x.shape[0], and operations on all rows at once"
            )
        if func is torch._C._set_grad_enabled and _inside_autocast():
            raise CaptureError(
                "the model changes grad mode (no_grad / enable_grad) inside an autocast region, which "
                "torch.export drops silently; put the autocast inside the no_grad instead"
            )
        return func(*args, **(kwargs or {}))


def _inside_autocast() -> bool:
    """Only export's own mode is told of autocast regions; it keeps those that are open."""
    modes = torch.overrides._get_current_function_mode_stack()
    return any(getattr(mode, "enter_autocast_nodes", None) for mode in modes)


def _over_rows(args: Any, kwargs: Any) -> bool:
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    return isinstance(args[0].shape[dim], torch.SymInt)


def _user_line() -> str:
    """The innermost line outside torch and this package."""
    for frame in reversed(traceback.extract_stack()):
        if "/torch/" not in frame.filename and "/spec_compile/" not in frame.filename:
            return f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"
    return "a model"
