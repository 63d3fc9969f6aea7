"""Plain target and draft modules -> one functional FX graph over their original parameters."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.export import Dim
from torch.fx import GraphModule

from spec_compile.errors import CaptureError, ConfigError, PlanError, SpecCompileError
from spec_compile.ir.dtypes import accumulator
from spec_compile.ir.edit import attribute
from spec_compile.ir.meta import describe_frame, is_users
from spec_compile.ir.tracing import capturing

from . import attention, experts, linear_attention, text_positions
from .call_watch import Learned
from .dropout import active_dropout
from .joint import INPUTS, JointModule
from .row_sizes import EXAMPLE_ANCHORS, EXAMPLE_ROWS
from .row_window import ADVICE
from .skeleton import skeleton
from .target import TargetView

log = logging.getLogger(__name__)

RECOGNISE = "spec_compile_recognise"
"""Attribute of a draft: how far recognition of its attention goes."""


ASK_FOR_ANCHORS = (
    "the draft reads inputs.anchors, which is None: a draft asks for anchors by its attributes block_size and "
    "anchors_per_document, ints of at least 1 on the module itself"
)


@dataclass(frozen=True)
class Captured:
    """One graph of target and draft, and what is known about its call."""

    graph_module: GraphModule
    num_layers: int
    taps: tuple[int, ...]
    has_draft: bool
    stat_names: tuple[str, ...]
    anchors_per_document: int
    """Anchors that the library draws for the draft; 0: it reads none."""
    embedding_name: str
    """Qualified name of the target's input embedding weight in the graph module."""
    head_name: str
    prove_by_execution: bool
    """Whether the draft lets a softmax written by hand be recognised."""
    notes: tuple[str, ...]
    hint: str
    """What may be behind a refusal of the graph; empty for nothing."""


def capture(
    target: nn.Module, draft: nn.Module | None, *, dtype: torch.dtype | None = None
) -> Captured:
    """Trace target and draft on one packed row with a symbolic number of rows.

    Args:
        target: transformers causal language model, on any device including meta; left as it was.
        draft: module of the draft contract, or None.
        dtype: compute type when it is not the parameters' own.

    Raises:
        CaptureError: a module does something that cannot be traced; names the source line where known.
        PlanError: the draft's taps do not exist in the target.
        ConfigError: the draft has active dropout.
    """
    taps = _check_draft(draft, TargetView.of(target).num_layers)
    target_copy: Any = skeleton(target, dtype).eval()
    draft_copy = skeleton(draft, dtype) if draft is not None else None
    attention.install(target_copy)
    experts.install(target_copy)
    linear_attention.install(target_copy)
    text_positions.install(target_copy)
    view = TargetView.of(target_copy)
    joint = JointModule(view, draft_copy, taps)
    per_document = _anchors_per_document(draft)
    example = _example(next(target.parameters()).device, anchored=per_document > 0)
    rows, anchors = Dim("T", min=2, max=2**31 - 1), Dim("A", min=2, max=2**31 - 1)
    shapes: dict[str, Any] = {
        name: ({0: rows} if name != "temperature" else None) for name in INPUTS
    }
    if per_document:
        shapes["anchors"] = {0: anchors}
    with _quiet(), capturing(), torch.enable_grad():
        try:
            exported = torch.export.export(joint, (), example, dynamic_shapes=shapes, strict=False)
        except SpecCompileError as error:
            if joint.learned.misses_anchors:
                error.add_note(ASK_FOR_ANCHORS)
            raise
        except Exception as error:
            raise _explain(error, joint.learned) from error
    gm = exported.module(check_guards=False)
    return Captured(
        graph_module=_rebind(gm, target, draft),
        num_layers=view.num_layers,
        taps=taps,
        has_draft=draft is not None,
        stat_names=joint.learned.stats,
        anchors_per_document=per_document,
        embedding_name=_name_of(target, target.get_input_embeddings().weight),  # type: ignore[operator]
        head_name=_name_of(target, target.get_output_embeddings().weight),  # type: ignore[operator]
        prove_by_execution=_proved(draft),
        notes=_notes(target, draft),
        hint=ASK_FOR_ANCHORS if joint.learned.misses_anchors else "",
    )


def _check_draft(draft: nn.Module | None, num_layers: int) -> tuple[int, ...]:
    if draft is None:
        return ()
    name = type(draft).__name__
    taps = getattr(draft, "taps", None)
    if not isinstance(taps, (tuple, list)):
        raise PlanError(
            f"{name}.taps must be a tuple of layer numbers ('after i layers'), found {taps!r}"
        )
    for tap in taps:
        if isinstance(tap, bool) or not isinstance(tap, int) or not 0 <= tap < num_layers:
            raise PlanError(
                f"{name}.taps={tuple(taps)!r}: {tap!r} does not exist; expected 0 (embeddings) to {num_layers - 1} "
                f"in a target of {num_layers} layers (the output of the last layer is not a tap: read teacher.hidden)"
            )
    for path, module in draft.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0 and module.training:
            raise ConfigError(
                f"{name}.{path} is an active dropout (p={module.p}); set it to 0 or call draft.eval()"
            )
    return tuple(taps)


def _anchors_per_document(draft: nn.Module | None) -> int:
    sizes = [getattr(draft, name, None) for name in ("block_size", "anchors_per_document")]
    if draft is None or None in sizes:
        return 0
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        raise PlanError(
            f"{type(draft).__name__}: block_size and anchors_per_document must be ints of at least 1, found "
            f"{sizes[0]!r} and {sizes[1]!r}"
        )
    return int(sizes[1])  # type: ignore[arg-type]


def _proved(draft: nn.Module | None) -> bool:
    value = getattr(draft, RECOGNISE, "mask")
    if value not in ("mask", "execution"):
        raise PlanError(
            f"{type(draft).__name__}.{RECOGNISE} must be 'mask', or 'execution' to have attention written by hand "
            f"proved, found {value!r}"
        )
    return bool(value == "execution")


def _example(device: torch.device, *, anchored: bool) -> dict[str, torch.Tensor]:
    index = torch.arange(EXAMPLE_ROWS, device=device)
    anchors = {"anchors": torch.arange(EXAMPLE_ANCHORS, device=device)} if anchored else {}
    return {
        "tokens": torch.zeros_like(index),
        "positions": index.clone(),
        "document": torch.zeros_like(index),
        "index": index,
        "loss_mask": torch.ones_like(index, dtype=torch.bool),
        "temperature": torch.ones((), device=device),
        **anchors,
    }


def _rebind(gm: GraphModule, target: nn.Module, draft: nn.Module | None) -> GraphModule:
    """Replace the copies' parameters and buffers by the original objects, tied names by one name."""
    originals: dict[str, Any] = {}
    for prefix, module in (("target", target), ("draft", draft)):
        if module is None:
            continue
        for name, value in [
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        ]:
            originals[f"{prefix}.{name}"] = value
    root = nn.Module()
    for node in gm.graph.nodes:
        if node.op != "get_attr":
            continue
        found = originals.get(node.target)
        _assign(root, node.target, attribute(gm, node.target) if found is None else found)
    rebound = GraphModule(root, gm.graph, class_name="Joint")
    rebound.meta.update(gm.meta)
    return rebound


def _assign(root: nn.Module, target: str, value: Any) -> None:
    *path, leaf = target.split(".")
    module = root
    for part in path:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module._modules[part]  # type: ignore[assignment]
    if isinstance(value, nn.Parameter):
        module._parameters[leaf] = value
    elif isinstance(value, torch.Tensor):
        module.register_buffer(leaf, value, persistent=False)
    else:
        setattr(module, leaf, value)


def _name_of(target: nn.Module, weight: torch.Tensor) -> str:
    return next("target." + name for name, value in target.named_parameters() if value is weight)


def _notes(target: nn.Module, draft: nn.Module | None) -> tuple[str, ...]:
    notes = []
    if getattr(target, "is_gradient_checkpointing", False):
        notes.append(
            "the target's own gradient checkpointing is not part of the graph; use Plan(recompute='layers')"
        )
    if dropping := active_dropout(target):
        notes.append(
            f"the target's dropout is off in every step, though it is in training mode: {', '.join(dropping)}; set it "
            "to 0, or call eval(), to say so yourself"
        )
        log.warning("%s: %s", type(target).__name__, notes[-1])
    models = {"target": target, "draft": draft}
    if halves := [name for name, module in models.items() if module and _trains_in_half(module)]:
        notes.append(
            f"parameters of {' and '.join(halves)} train in a half type: steps of the optimizer that are small beside "
            "a weight round away. Load them with dtype=torch.float32 and set Plan(param_dtype='bfloat16')"
        )
        log.warning("%s", notes[-1])
    return tuple(notes)


def _trains_in_half(module: nn.Module) -> bool:
    return any(p.requires_grad and p.dtype != accumulator(p.dtype) for p in module.parameters())


def _explain(error: Exception, learned: Learned) -> CaptureError | PlanError:
    frames: list[str] = []
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if is_users(code.co_filename):
            frames.append(describe_frame(code.co_filename, trace.tb_lineno, code.co_name))
        trace = trace.tb_next
    if not frames and learned.condition is not None:
        line, condition = learned.condition
        return PlanError(
            f"{line}\n  does not work for every number of rows T of the packed row (it needs {condition}): it looks "
            f"across rows, or branches on their number; {ADVICE}"
        )
    where = f"{frames[-1]}\n  " if frames else ""
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    # torch's words name a symbol, not what to change
    on_values = "DataDependent" in type(error).__name__
    hint = "; a branch on values of a tensor cannot be traced: use torch.where" if on_values else ""
    if learned.misses_anchors:
        hint += f"; {ASK_FOR_ANCHORS}"
    return CaptureError(
        f"{where}torch.export could not trace the models: {type(error).__name__}: {first}{hint}"
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
