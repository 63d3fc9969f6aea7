"""The stable text of a graph: one node a line, no addresses, strides, device numbers, or generated names."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from .meta import info
from .placement import Kind

DTYPES = {
    torch.float64: "f64", torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16",
    torch.int64: "i64", torch.int32: "i32", torch.bool: "b8",
}  # fmt: skip


def format_graph(gm: GraphModule) -> str:
    """Return the graph as text; rows print as T or A (whole packed row, all anchors) or n or a (this rank's)."""
    names = {node: f"%{i}" for i, node in enumerate(gm.graph.nodes)}
    symbols = (row_symbol(gm.graph), anchor_symbol(gm.graph))
    return "\n".join(_line(node, names, symbols) for node in gm.graph.nodes)


def row_symbol(graph: Graph) -> Any:
    """The symbol of the number of rows: the size of the first one-dimensional placeholder."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and isinstance(value, torch.Tensor) and value.ndim == 1:
            return _symbol(value)
    return None


def anchor_symbol(graph: Graph) -> Any:
    """The symbol of the number of anchors, None in a graph without any."""
    for node in graph.nodes:
        if node.op == "placeholder" and node.target == "anchors":
            return _symbol(node.meta["val"])
    return None


def _symbol(value: torch.Tensor) -> Any:
    size = value.shape[0]
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _line(node: Node, names: dict[Node, str], symbols: tuple[Any, Any]) -> str:
    facts = info(node)
    notes = [facts.role] if facts.role else []
    if facts.layer is not None:
        notes.append(f"layer {facts.layer}")
    if facts.placement is not None:
        notes.append(str(facts.placement))
    comment = f"  # {', '.join(notes)}" if notes else ""
    if node.op == "output":
        return f"{names[node]} = output({_text(node.args[0], names)})"
    kind = _type(node, symbols)
    if node.op in ("placeholder", "get_attr"):
        return f"{names[node]}: {kind} = {node.op}({node.target}){comment}"
    args = [_text(a, names) for a in node.args] + [
        f"{k}={_text(v, names)}" for k, v in node.kwargs.items()
    ]
    target = getattr(node.target, "__name__", None) or str(node.target)
    if isinstance(node.target, torch._ops.OpOverload):
        target = str(node.target)
    return f"{names[node]}: {kind} = {target}({', '.join(args)}){comment}"


def _type(node: Node, symbols: tuple[Any, Any]) -> str:
    value = node.meta.get("val")
    placement = info(node).placement
    local = placement is not None and placement.kind == Kind.ROWS
    if isinstance(value, torch.Tensor):
        sizes = [_size(s, symbols, local=local) for s in value.shape]
        return f"{DTYPES.get(value.dtype, str(value.dtype))}[{', '.join(sizes)}]"
    if isinstance(value, (tuple, list)):
        return "tuple"
    return "int" if isinstance(value, (int, torch.SymInt)) else "none"


def _size(size: Any, symbols: tuple[Any, Any], *, local: bool) -> str:
    text = str(size.node.expr) if isinstance(size, torch.SymInt) else str(size)
    for symbol, letter in zip(symbols, "na" if local else "TA", strict=True):
        text = text if symbol is None else text.replace(str(symbol), letter)
    return text


def _text(value: Any, names: dict[Node, str]) -> str:
    if isinstance(value, Node):
        return names[value]
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_text(v, names) for v in value)}]"
    if isinstance(value, torch.device):  # without its number: every rank has a device of its own
        return value.type
    return repr(value)
