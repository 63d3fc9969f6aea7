"""What capture learns call by call: the user's line of every node, and what export loses or reports late."""

from __future__ import annotations

import traceback
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.overrides import TorchFunctionMode

from spec_compile.errors import CaptureError
from spec_compile.ir.meta import describe_frame, is_users, user_frames, user_line

from .row_sizes import in_rows


class CallWatch(TorchFunctionMode):
    """Write the user's whole stack on nodes, and say plainly what torch.export does silently or far from its cause.

    Export keeps only frames named ``forward``; it drops a ``no_grad`` inside ``autocast`` (parameters would
    train); ``len`` of rows or a loop over them makes their number a constant; and it reports a condition on
    the number of rows only at its end, without a line.
    """

    def __init__(self, rows: Any, learned: Learned) -> None:
        super().__init__()
        self.learned = learned
        self._env = rows.node.shape_env if isinstance(rows, torch.SymInt) else None
        self._seen = len(self._guards())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (Tensor.__len__, Tensor.unbind, torch.unbind) and _over_rows(args, kwargs):
            raise CaptureError(
                f"{user_line()}\n  len() of rows, or a Python loop over them, fixes their number; write "
                "x.shape[0], and operations on all rows at once"
            )
        if func is torch._C._set_grad_enabled and _inside_autocast():
            raise CaptureError(
                f"{user_line()}\n  the model changes grad mode (no_grad / enable_grad) inside an autocast region, "
                "which torch.export drops silently; put the autocast inside the no_grad instead"
            )
        self.look_for_conditions()
        before = last_node()
        result = func(*args, **kwargs)
        _write_lines(before)
        self.look_for_conditions()
        return result

    def look_for_conditions(self) -> None:
        """Remember the first condition that tracing has put on the number of rows, with its line."""
        guards = self._guards()
        for guard in guards[self._seen :]:
            condition = in_rows(guard.expr)
            if self.learned.condition is None and condition is not True:
                self.learned.condition = (_line_of(guard), str(condition))
        self._seen = len(guards)

    def _guards(self) -> list[Any]:
        return list(getattr(self._env, "guards", ()))


class Learned:
    """What tracing learned; an object of its own, because torch.export undoes changes of a module's attributes."""

    def __init__(self) -> None:
        self.stats: tuple[str, ...] = ()
        self.condition: tuple[str, str] | None = None
        """Line and text of the first condition on the number of rows T."""
        self.misses_anchors = False
        """Whether the draft reads anchors that it was not given."""


def _line_of(guard: Any) -> str:
    """Where a condition arose; one in an ``if`` comes from no call, and torch knows its frame itself."""
    frame = getattr(getattr(guard, "sloc", None), "framework_loc", None)
    if isinstance(frame, traceback.FrameSummary) and is_users(frame.filename):
        return describe_frame(frame.filename, frame.lineno or 0, frame.name)
    return user_line()


def last_node() -> Node | None:
    """The node that tracing made last."""
    mode = get_proxy_mode()
    return None if mode is None else next(iter(reversed(mode.tracer.graph.nodes)), None)


def _write_lines(before: Node | None) -> None:
    """Give the nodes after ``before`` the user's frames."""
    node = last_node()
    if node is before or before is None:
        return
    summary = traceback.StackSummary.from_list([(f, n, name, None) for f, n, name in user_frames()])
    text = "".join(summary.format()).strip()
    while node is not None and node is not before and node.op != "root":
        if text:
            node.meta["stack_trace"] = text
        node = node.prev


def _inside_autocast() -> bool:
    """Only export's own mode is told of autocast regions; it keeps those that are open."""
    modes = torch.overrides._get_current_function_mode_stack()
    return any(getattr(mode, "enter_autocast_nodes", None) for mode in modes)


def _over_rows(args: Any, kwargs: Any) -> bool:
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    return isinstance(args[0], Tensor) and isinstance(args[0].shape[dim], torch.SymInt)
