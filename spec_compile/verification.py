"""Numeric check of a capture: the graph against the plain modules, on a few packed tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from spec_compile.capture.skeleton import skeleton
from spec_compile.capture.target import TargetView
from spec_compile.capture.trace import Captured
from spec_compile.contract import DraftInputs, TeacherView
from spec_compile.errors import CaptureError, SpecCompileError
from spec_compile.plan import Plan

SMALL = 20_000_000
"""Parameters up to which the check runs."""
LENGTHS = (5, 1, 6)
ANCHORS = (0, 2, 5, 7, -1)
STATIC = "static invariants after every pass"


def check_numbers(
    target: nn.Module, draft: nn.Module | None, captured: Captured, plan: Plan
) -> str:
    """Compare the captured graph with the eager modules; returns which checks ran, in words.

    Raises:
        CaptureError: the graph computes something else than the modules.
    """
    parameters = [*target.parameters(), *(draft.parameters() if draft is not None else ())]
    if not plan.verify:
        return f"{STATIC}; numeric check off (verify=False)"
    if any(p.device.type == "meta" for p in parameters):
        return f"{STATIC}; no numeric check (meta device)"
    if sum(p.numel() for p in parameters) > SMALL:
        return f"{STATIC}; no numeric check (more than {SMALL:,} parameters)"
    if plan.param_dtype is not None:
        return f"{STATIC}; no numeric check (param_dtype is set)"
    try:
        with torch.no_grad():
            worst = _compare(target, draft, captured)
    except SpecCompileError:
        raise
    except Exception as error:
        raise CaptureError(
            f"the plain modules fail on {sum(LENGTHS)} packed tokens, before any compilation "
            f"({type(error).__name__}: {error}); run target and draft eagerly first"
        ) from error
    return (
        f"{STATIC}; captured graph equals the eager modules on {sum(LENGTHS)} packed tokens "
        f"(largest difference {worst:.1e})"
    )


def _compare(target: nn.Module, draft: nn.Module | None, captured: Captured) -> float:
    inputs = _inputs(target)
    if captured.anchors_per_document:
        inputs["anchors"] = torch.tensor(ANCHORS, device=inputs["tokens"].device)
    view = TargetView.of(skeleton(target, None).eval())
    logprobs, entropy, residuals, hidden = _eager_target(view, inputs["tokens"])
    found = captured.graph_module(**inputs, temperature=torch.ones((), device=logprobs.device))
    last = torch.tensor(LENGTHS).cumsum(0) - 1
    keep = torch.ones(sum(LENGTHS), dtype=torch.bool)
    keep[last] = False
    pairs = [
        ("log-probs", found[0][keep], logprobs[keep]),
        ("entropies", found[1][keep], entropy[keep]),
    ]
    if draft is not None:
        output = skeleton(draft, None)(_draft_inputs(view, captured, inputs, residuals, hidden))
        pairs += [
            ("draft loss", found[2], output.loss_sum),
            ("draft count", found[3], output.count),
        ]
    worst = 0.0
    for what, a, b in pairs:
        gap = _gap(a.double(), b.double()) if b.numel() else 0.0
        worst = max(worst, gap)
        limit = 1e-3 if hidden.dtype in (torch.float32, torch.float64) else 5e-2
        if not gap <= limit:
            raise CaptureError(
                f"the captured graph's {what} differ from the eager modules' by {gap:.2e} (limit {limit:.0e}): the "
                "model does something that capture does not see, such as changing its logits after the head"
            )
    return worst


def _gap(a: Tensor, b: Tensor) -> float:
    """Largest relative difference; a model that gives nan or inf itself is not different for it."""
    same = (a == b) | (a.isnan() & b.isnan())
    difference = torch.where(same, 0.0, (a - b).abs())
    return float(difference.max()) / float(b.abs().nan_to_num(1.0).max().clamp_min(1.0))


def _inputs(target: nn.Module) -> dict[str, Tensor]:
    device = next(target.parameters()).device
    sizes = torch.tensor(LENGTHS)
    vocab = target.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    document = torch.arange(len(LENGTHS)).repeat_interleave(sizes)
    index = torch.arange(int(sizes.sum()))
    positions = index - (sizes.cumsum(0) - sizes)[document]
    return {
        "tokens": ((index * 7 + 3) % vocab).to(device),
        "positions": positions.to(device),
        "document": document.to(device),
        "index": index.to(device),
        "loss_mask": (positions > 0).to(device),
    }


def _eager_target(view: TargetView, tokens: Tensor) -> tuple[Tensor, Tensor, list[Tensor], Tensor]:
    """Run the plain target document by document, with its own attention and head."""
    logps, entropies, layers, finals = [], [], [], []
    for ids in tokens.split(list(LENGTHS)):
        output: Any = view.model(input_ids=ids[None], use_cache=False, output_hidden_states=True)
        logp = output.logits[0].double().log_softmax(-1)
        following = torch.cat([ids[1:], ids[:1]])
        logps.append(logp.gather(-1, following[:, None])[:, 0])
        entropies.append(-(logp.exp() * logp).sum(-1))
        layers.append([h[0] for h in output.hidden_states[:-1]])
        finals.append(output.hidden_states[-1][0])
    residuals = [torch.cat(parts) for parts in zip(*layers, strict=True)]
    return torch.cat(logps), torch.cat(entropies), residuals, torch.cat(finals)


def _draft_inputs(
    view: TargetView,
    captured: Captured,
    inputs: dict[str, Tensor],
    residuals: list[Tensor],
    hidden: Tensor,
) -> DraftInputs:
    features = [residuals[i] for i in captured.taps]
    return DraftInputs(
        features=torch.cat(features, -1) if features else hidden[:, :0],
        embedding=lambda ids: nn.functional.embedding(ids, view.embedding.weight.detach()),
        teacher=TeacherView(hidden=hidden, weight=view.head.weight.detach()),
        **inputs,
    )
