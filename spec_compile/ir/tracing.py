"""Whether a model is being captured right now: declared operators become one node each only then."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

_local = threading.local()


def is_capturing() -> bool:
    """True while this thread captures a model into a graph."""
    return bool(getattr(_local, "depth", 0))


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """Mark this thread as capturing."""
    _local.depth = getattr(_local, "depth", 0) + 1
    try:
        yield
    finally:
        _local.depth -= 1
