"""The one metadata key of the graph: ``node.meta["spec"]`` holds a frozen `NodeInfo`."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
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


PACKAGES = tuple(
    os.path.realpath(os.path.dirname(path)) + os.sep
    for path in (os.path.dirname(__file__), torch.__file__)
)
"""Folders of this package and of torch: frames in them are not the user's."""


def _is_users(frame: str) -> bool:
    path = frame[5:].partition(", line ")[0].strip('"')
    return not os.path.realpath(path).startswith(PACKAGES)


def source_line(node: Node) -> str:
    """The user's file, line and code of a node: the innermost frame outside torch and this package."""
    frames = [line.strip() for line in str(node.meta.get("stack_trace", "")).splitlines()]
    found = ""
    for i, line in enumerate(frames):
        if line.startswith("File ") and _is_users(line):
            path, _, rest = line[5:].partition(", line ")
            number, _, function = rest.partition(", in ")
            code = frames[i + 1] if i + 1 < len(frames) else ""
            found = f"{path.strip(chr(34))}:{number} in {function}: {code}"
    return found or f"node {node.name}"
