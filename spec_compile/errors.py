"""The error tree. A message says what was expected, what was found, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SpecCompileError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(SpecCompileError, ValueError):
    """A value of the plan, the draft's configuration or a call argument is not allowed."""


class CaptureError(SpecCompileError):
    """The models could not be traced into one graph; names the user's file and line where known."""


class PlanError(SpecCompileError):
    """The captured graph and the plan do not fit together; names the user's file and line where known."""


class PassError(SpecCompileError):
    """A rewrite failed; names the pass and the graph before it."""


class InvariantError(SpecCompileError):
    """A rewrite broke a rule of the intermediate representation: a fault of this package."""


class CodegenError(SpecCompileError):
    """A kernel template could not be rendered, written, imported or compiled."""


class ChannelError(SpecCompileError):
    """A peer broke, died, stopped, or missed a deadline; names the channel, the peer, expected and seen."""


class BatchError(SpecCompileError, ValueError):
    """A batch is malformed, or ranks that should share a batch were given different ones."""


def did_you_mean(found: object, known: Iterable[str]) -> str:
    """Name the known word nearest to what was found, capitals aside: "; did you mean 'x'?", or nothing."""
    by_lower = {word.lower(): word for word in known}
    near = difflib.get_close_matches(str(found).lower(), by_lower, n=1)
    return f"; did you mean {by_lower[near[0]]!r}?" if near else ""
