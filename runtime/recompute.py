"""Recompute decoder layers in the backward pass instead of keeping their activations."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from spec_compile.errors import InvariantError
from spec_compile.ir.edit import attribute
from spec_compile.ir.facts import facts
from spec_compile.ir.meta import info

from .context import RunContext, bind, current

Unit = Node | int
"""A node outside decoder layers, or a layer."""


class _Keep(TorchDispatchMode):
    """Keep what this package's operators return: they communicate, and cost more than their memory."""

    def __init__(self, kept: list[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace == "spec_compile":
            self._kept.append(_detached(out))
        return out


class _Replay(TorchDispatchMode):
    """Answer this package's operators with what was kept, in the same order."""

    def __init__(self, kept: Sequence[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = iter(kept)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "spec_compile":
            return _detached(next(self._kept))
        return func(*args, **(kwargs or {}))


def _detached(out: Any) -> Any:
    """The same values apart from the graph, which would otherwise keep them, and they it, for ever."""
    return out.detach() if isinstance(out, Tensor) else type(out)(_detached(x) for x in out)


class RecomputedLayer(nn.Module):
    """One decoder layer: keeps its inputs and its attention's outputs, and runs again in the backward.

    Collectives run once: the second run takes the results of the first. It happens on whichever thread
    the backward runs on, under the context of the first.
    """

    def __init__(self, body: GraphModule) -> None:
        super().__init__()
        self.body = body

    def forward(self, *args: Any) -> Any:
        """Values that later layers, taps or the loss read."""
        if not torch.is_grad_enabled():
            return self.body(*args)
        context, kept = current(), list[Any]()

        def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
            return _Keep(kept), _SecondRun(context, kept)

        return checkpoint(
            self.body,
            *args,
            use_reentrant=False,
            preserve_rng_state=False,  # layers draw nothing: dropout is off
            context_fn=contexts,
        )


class _SecondRun(contextlib.ExitStack):
    """Everything that surrounds a second run; may be entered several times."""

    def __init__(self, context: RunContext, kept: Sequence[Any]) -> None:
        super().__init__()
        self._context, self._kept = context, kept

    def __enter__(self) -> _SecondRun:
        super().__enter__()
        self.enter_context(bind(self._context))
        self.enter_context(_Replay(self._kept))
        return self


def recompute_layers(gm: GraphModule) -> GraphModule:
    """``x2 = layer1(layer0(x))``, node by node, becomes calls of one `RecomputedLayer` a decoder layer.

    What lies between layers stays outside: embedding, taps and their sends, final norm, losses.
    """
    layers = facts(gm).num_layers
    of_layer: dict[Node, int] = {}
    for node in gm.graph.nodes:
        role, layer = info(node).role, info(node).layer
        if node.op == "call_function" and role == "target" and layer is not None and layer < layers:
            of_layer[node] = layer
    _take_in_weights(gm, of_layer)
    return _Outline(gm, of_layer).build()


def _take_in_weights(gm: GraphModule, of_layer: dict[Node, int]) -> None:
    """Let a layer make its own copies of weights: casts would otherwise be kept until the backward."""
    for node in reversed(gm.graph.nodes):
        users = {of_layer.get(user) for user in node.users}
        layer = users.pop() if len(users) == 1 else None
        if layer is not None and node not in of_layer and _is_weight(node):
            of_layer[node] = layer


def _is_weight(node: Node) -> bool:
    return node.op == "get_attr" or (
        node.op == "call_function"
        and bool(node.all_input_nodes)
        and all(_is_weight(a) for a in node.all_input_nodes)
    )


class _Outline:
    """Copies a graph, with each layer's nodes moved to a module of their own."""

    def __init__(self, gm: GraphModule, of_layer: dict[Node, int]) -> None:
        self._gm, self._of_layer = gm, of_layer
        self._members: dict[int, list[Node]] = {}
        for node in gm.graph.nodes:
            if node in of_layer:
                self._members.setdefault(of_layer[node], []).append(node)
        self._graph = Graph()
        self._table: dict[Node, Node] = {}
        self._modules: dict[str, nn.Module] = {}
        self._done: set[Unit] = set()

    def build(self) -> GraphModule:
        for node in self._gm.graph.nodes:
            self._emit(self._unit(node))
        root: dict[str, Any] = dict(self._modules)
        for node in self._graph.nodes:
            if node.op == "get_attr":
                root[str(node.target)] = attribute(self._gm, str(node.target))
        result = GraphModule(root, self._graph, class_name=type(self._gm).__name__)
        result.meta.update(self._gm.meta)
        result.graph.lint()
        return result

    def _unit(self, node: Node) -> Unit:
        return self._of_layer.get(node, node)

    def _inputs(self, unit: Unit) -> list[Node]:
        """What a unit reads of other units."""
        if isinstance(unit, Node):
            return unit.all_input_nodes
        reads = [a for n in self._members[unit] for a in n.all_input_nodes]
        return [a for a in dict.fromkeys(reads) if self._unit(a) != unit]

    def _emit(self, unit: Unit) -> None:
        """Copy a unit and, before it, whatever it reads."""
        stack, waiting = [unit], set[Unit]()
        while stack:
            top = stack[-1]
            missing = [u for a in self._inputs(top) if (u := self._unit(a)) not in self._done]
            if top in self._done:
                stack.pop()
            elif missing:
                if top in waiting:
                    raise InvariantError(f"recompute: layers depend on each other at {top}")
                waiting.add(top)
                stack.extend(missing)
            else:
                self._copy(top)
                self._done.add(top)
                stack.pop()

    def _copy(self, unit: Unit) -> None:
        if isinstance(unit, Node):
            self._table[unit] = self._graph.node_copy(unit, lambda n: self._table[n])
            return
        inputs, members = self._inputs(unit), self._members[unit]
        results = [n for n in members if any(self._unit(user) != unit for user in n.users)]
        body, table = Graph(), {}
        for node in inputs:
            table[node] = body.placeholder(node.name)
            table[node].meta.update(node.meta)
        for node in members:
            table[node] = body.node_copy(node, lambda n: table[n])
        body.output(tuple(table[n] for n in results))
        name = f"layer{unit}"
        self._modules[name] = RecomputedLayer(GraphModule(self._gm, body, class_name=name))
        call = self._graph.call_module(name, tuple(self._table[n] for n in inputs))
        for i, node in enumerate(results):
            self._table[node] = self._graph.call_function(operator.getitem, (call, i))
            self._table[node].meta.update(node.meta)
