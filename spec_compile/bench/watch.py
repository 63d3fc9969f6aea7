"""Look inside a step as it is dispatched: which lines hold memory at its peak, and which start kernels.

Works on any device, a CPU included, because it counts storages and calls and not what a driver reports.
"""

from __future__ import annotations

import abc
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import spec_compile
from spec_compile.errors import InvariantError
from spec_compile.ir.operator import BODIES

PACKAGE = Path(spec_compile.__file__).parent
HERE = Path(__file__)
VIEWS = frozenset({"detach", "alias", "lift_fresh"})
"""Calls that start no kernel, beside those that the schema marks as views."""


class Watch(TorchDispatchMode, abc.ABC):
    """Sees every call of ATen under it, also those inside the operators of this package."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        """Run the call; our own operators run under this mode once more."""
        kwargs = kwargs or {}
        if func.namespace == spec_compile.__name__:
            body = _body(func)
            with self:
                return body(*args, **kwargs)
        result = func(*args, **kwargs)
        self.see(func, result)
        return result

    @abc.abstractmethod
    def see(self, func: Any, result: Any) -> None:
        """Take note of a call that was made."""


class LiveBytes(Watch):
    """Bytes of the storages that live, and of those that lived at the peak.

    Only storages that a call under this mode returned are known. What a kernel takes and gives back
    inside one call is not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live, self.peak = 0, 0
        self._held: dict[int, tuple[int, str]] = {}
        self._at_peak: list[tuple[int, str]] = []

    def see(self, func: Any, result: Any) -> None:
        """Count new storages until they are freed."""
        for x in tree_leaves(result):
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                key = storage._cdata
                if key not in self._held:
                    self._held[key] = (storage.nbytes(), _line(func))
                    self.live += storage.nbytes()
                    weakref.finalize(storage, self._free, key)
        if self.live > self.peak:
            self.peak, self._at_peak = self.live, list(self._held.values())

    def _free(self, key: int) -> None:
        self.live -= self._held.pop(key)[0]

    def holders(self) -> list[tuple[str, int]]:
        """Which lines made what lived at the peak, and its bytes; most first."""
        total: Counter[str] = Counter()
        for size, line in self._at_peak:
            total[line] += size
        return total.most_common()


class Calls(Watch):
    """Calls that start a kernel on a GPU, by the line of this package that made them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._lines: Counter[str] = Counter()

    def see(self, func: Any, result: Any) -> None:
        """Count it, unless it only makes a view or takes memory."""
        name = func._schema.name.split("::")[1]
        changes_nothing = name.startswith(("empty", "new_empty")) or name in VIEWS
        if not (changes_nothing or func.is_view):
            self._lines[_line(func)] += 1

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self._lines.values())

    def lines(self) -> list[tuple[str, int]]:
        """Line and operator, and their number; most first."""
        return self._lines.most_common()


def _body(func: Any) -> Callable[..., Any]:
    """The Python body of one of our operators."""
    name = func._schema.name
    definition = torch._library.custom_ops.OPDEFS.get(name)
    body: Callable[..., Any] | None = definition._init_fn if definition else BODIES.get(name)
    if body is None:
        raise InvariantError(f"{name} is no operator of this package; declare it with @operator")
    return body


def _line(func: Any) -> str:
    """File, line and function of the innermost frame of this package, and the operator."""
    frame: FrameType | None = sys._getframe(1)
    place = "outside"
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path != HERE and path.is_relative_to(PACKAGE):
            relative = path.relative_to(PACKAGE)
            place = f"{relative}:{frame.f_lineno} {frame.f_code.co_name}"
            break
        frame = frame.f_back
    return f"{place} {func._schema.name.split('::')[1]}"
