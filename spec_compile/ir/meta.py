"""The one metadata key of the graph: ``node.meta["spec"]`` holds a frozen `NodeInfo`."""

from __future__ import annotations

import dataclasses
import functools
import linecache
import os
import sys
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch.fx import Node

from .placement import Placement

KEY = "spec"


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """Facts about one node."""

    role: str = ""
    """ "batch" (ids and masks only), "target", "draft", or "" before roles are marked."""
    layer: int | None = None
    """Decoder layer of the target; ``num_layers`` after the last."""
    stage: int | None = None
    placement: Placement | None = None
    origin: str = ""
    """Module path in the user's model, or the pass that made the node."""


def info(node: Node) -> NodeInfo:
    """Facts of a node; empty facts when none were recorded."""
    value = node.meta.get(KEY)
    return value if isinstance(value, NodeInfo) else NodeInfo()


def update(node: Node, **changes: Any) -> None:
    """Change some facts of a node."""
    node.meta[KEY] = dataclasses.replace(info(node), **changes)


def set_spelling(node: Node, name: str) -> None:
    """Say what the user called, where tracing writes another operator; ``custom`` is what export keeps."""
    node.meta["custom"] = {**node.meta.get("custom", {}), "spelling": name}


def spelling(node: Node) -> str:
    """What the user called: the node's name, or what was said instead."""
    return str((node.meta.get("custom") or {}).get("spelling", node.name))


_ROOT = os.path.dirname(os.path.dirname(__file__))
PACKAGES = tuple(
    os.path.realpath(path) + os.sep
    for path in (
        _ROOT,
        os.path.join(_ROOT, "passes"),  # both are links in a checkout
        os.path.join(_ROOT, "runtime"),
        os.path.dirname(torch.__file__),
    )
)
"""Folders of this package and of torch: frames in them are not the user's."""
DRAFTS = os.path.realpath(os.path.join(_ROOT, "drafts")) + os.sep
"""Written like a user's drafts, and like them named in errors."""


@functools.cache
def is_users(path: str) -> bool:
    """Whether a source file is the user's: neither torch's nor this package's."""
    real = os.path.realpath(path)
    return real.startswith(DRAFTS) or not real.startswith(PACKAGES)


def user_frames() -> list[tuple[str, int, str]]:
    """File, line and function of the user's frames on the stack, outermost first."""
    found: list[tuple[str, int, str]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if is_users(code.co_filename):
            found.append((code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back
    return found[::-1]


def describe_frame(path: str, line: int, function: str) -> str:
    """One frame as errors show it: file, line, function and code."""
    code = linecache.getline(path, line).strip()
    return f"{path}:{line} in {function}: {code}"


def user_line() -> str:
    """The user's line that runs right now: the innermost frame outside torch and this package."""
    frames = user_frames()
    return describe_frame(*frames[-1]) if frames else "a model"


def source_line(node: Node) -> str:
    """The user's file, line and code of a node: the innermost frame outside torch and this package."""
    frames = [line.strip() for line in str(node.meta.get("stack_trace", "")).splitlines()]
    found = ""
    for i, line in enumerate(frames):
        if not line.startswith("File "):
            continue
        path, _, rest = line[5:].partition(", line ")
        if is_users(path.strip('"')):
            number, _, function = rest.partition(", in ")
            code = frames[i + 1] if i + 1 < len(frames) else ""
            found = f"{path.strip(chr(34))}:{number} in {function}: {code}"
    return found or f"node {node.name}"


def at_node(node: Node, text: str) -> str:
    """What errors say of a node: the user's line, then what was called there and ``text``."""
    called = spelling(node)
    what = f"{node.target} ({node.name})" if called == node.name else called
    return f"{source_line(node)}\n  {what} {text}"
