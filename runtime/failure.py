"""The failure word: what one rank tells all others about the error that ends a step."""

from __future__ import annotations

import builtins
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from spec_compile import errors
from spec_compile.errors import ChannelError, SpecCompileError

MAX_TEXT = 1 << 16


@dataclass(frozen=True)
class FailureWord:
    """One error as text, so that it can travel without pickle."""

    kind: str
    """Name of the class that `exception` builds."""
    message: str
    rank: int
    """The rank that reports it."""
    traceback: str = ""
    """Formatted on the reporting rank; empty for failures that the control plane found itself."""

    @classmethod
    def of(cls, error: BaseException, rank: int) -> FailureWord:
        """Describe ``error``; never raises, whatever its ``__str__`` does."""
        try:
            text = error.args[0] if len(error.args) == 1 else None
            message = text if isinstance(text, str) else str(error)
        except Exception:  # a broken __str__ must not hide that the step failed
            message = "(the error has no readable message)"
        try:
            lines = "".join(traceback.format_exception(error))
        except Exception:  # the same, for a broken note or cause
            lines = ""
        kind = _portable_name(type(error))
        if kind is None:
            kind, message = _fallback(error), f"{type(error).__qualname__}: {message}"
        return cls(kind, message[:MAX_TEXT], rank, lines[-MAX_TEXT:])

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> FailureWord:
        """Read a word that another rank sent as ``dataclasses.asdict``."""
        names = ("kind", "message", "traceback")
        return cls(rank=int(data["rank"]), **{name: str(data[name]) for name in names})

    def exception(self) -> Exception:
        """Build a new error of the same class, with the original traceback as a note."""
        error = _build(_portable_class(self.kind) or SpecCompileError, self)
        if self.traceback:
            error.add_note(f"raised on rank {self.rank}:\n{self.traceback.rstrip()}")
        else:
            error.add_note(f"reported by rank {self.rank}")
        return error


def _build(kind: type[Exception], word: FailureWord) -> Exception:
    try:
        return kind(word.message)
    except TypeError:  # a class that one message does not make, such as UnicodeDecodeError
        return SpecCompileError(f"{word.kind}: {word.message}")


def _portable_class(name: str) -> type[Exception] | None:
    """Find the error class that every rank knows under ``name``."""
    found = getattr(errors, name, None) or getattr(builtins, name, None)
    return found if isinstance(found, type) and issubclass(found, Exception) else None


def _portable_name(kind: type[BaseException]) -> str | None:
    return kind.__name__ if _portable_class(kind.__name__) is kind else None


def _fallback(error: BaseException) -> str:
    """Name the class for errors of foreign classes; an interrupted rank is a lost peer."""
    return SpecCompileError.__name__ if isinstance(error, Exception) else ChannelError.__name__


class SharedFailure(Exception):
    """Carries an error that every rank has heard of, so that nobody waits and the next call can work."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


class FailureLatch:
    """Holds the first failure that this rank heard of; later ones change nothing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._heard = threading.Event()
        self._word: FailureWord | None = None
        self._listeners: list[Callable[[], None]] = []

    def set(self, word: FailureWord) -> bool:
        """Keep ``word`` and call the listeners, unless there is one already; True when kept."""
        with self._lock:
            if self._word is not None:
                return False
            self._word = word
            self._heard.set()
            listeners = list(self._listeners)
        for listener in listeners:
            listener()
        return True

    def check(self) -> None:
        """Raise the failure, if any; each call raises a new object."""
        if self._word is not None:
            raise self._word.exception()

    def is_set(self) -> bool:
        """Tell whether a failure was heard."""
        return self._heard.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Wait for a failure; True when there is one."""
        return self._heard.wait(timeout_s)

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` once, from any thread, when a failure is heard or already was."""
        with self._lock:
            failed = self._word is not None
            if not failed:
                self._listeners.append(listener)
        if failed:
            listener()

    def unsubscribe(self, listener: Callable[[], None]) -> None:
        """Forget ``listener``."""
        with self._lock:
            if listener in self._listeners:
                self._listeners.remove(listener)
