"""Whether a target and a draft are models, and made for each other: asked wherever the two meet."""

from __future__ import annotations

from typing import Any

from torch import nn

from .errors import ConfigError


def check_pair(target: object, draft: object) -> None:
    """Refuse arguments that are no models, and a draft that was made for another target.

    Raises:
        ConfigError: says which one, what it should be, and what it is.
    """
    check_target(target)
    if draft is None:
        return
    if not isinstance(draft, nn.Module):
        raise ConfigError(
            f"draft must be an nn.Module of the draft contract, or None, found {kind_of(draft)}; build one, for "
            "instance with drafts.Eagle3.from_target(target), or read one with drafts.load(folder)"
        )
    _check_sizes(target, draft)


def check_target(target: object) -> None:
    """Refuse a target that is no model.

    Raises:
        ConfigError: says what it is.
    """
    if not isinstance(target, nn.Module):
        raise ConfigError(
            f"target must be an nn.Module, found {kind_of(target)}; pass the model itself"
        )


def check_apart(target: nn.Module, draft: nn.Module | None) -> None:
    """Refuse a trained parameter that both models hold: each loss has gradients and an optimizer group of its own.

    Raises:
        ConfigError: names it in both.
    """
    if draft is None:
        return
    trained = {id(p): name for name, p in target.named_parameters() if p.requires_grad}
    for name, parameter in draft.named_parameters():
        if id(parameter) in trained:
            raise ConfigError(
                f"the draft's {name} is the target's {trained[id(parameter)]}, which is trained: the policy's gradient "
                "would hold the draft's. Read the target's embedding and head, without a gradient, by "
                "inputs.embedding(ids) and inputs.teacher.weight; or give the draft a copy, or freeze it"
            )


def why_not_causal(target: Any) -> str | None:
    """Say why a model of transformers is no causal language model; None for one that may be."""
    name = type(target).__name__
    if getattr(getattr(target, "config", None), "is_encoder_decoder", False):
        return f"{name} is an encoder-decoder; give a causal LM, a decoder alone"
    if _head(target) is None:
        return f"{name} has no output head; give a causal LM, not its bare body"
    return None


def kind_of(value: object) -> str:
    """Name the kind of a wrong argument."""
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def _check_sizes(target: Any, draft: Any) -> None:
    """Compare what a draft's configuration says of its target, as those of the library do, with the target."""
    made_for = getattr(draft, "config", None)
    if not isinstance(getattr(made_for, "target_hidden_size", None), int):
        return
    text = getattr(getattr(target, "config", None), "get_text_config", lambda: None)()
    head = _head(target)
    found = {
        "target_hidden_size": getattr(text, "hidden_size", None),
        "vocab_size": None if head is None else head.weight.shape[0],
    }
    for name, size in found.items():
        expected = getattr(made_for, name, None)
        if isinstance(expected, int) and isinstance(size, int) and expected != size:
            kind = type(draft).__name__
            raise ConfigError(
                f"{kind} was made for {name} {expected}, the target has {size}; use {kind}.from_target(target), or "
                "the target that the draft was made for"
            )


def _head(target: Any) -> Any:
    return getattr(target, "get_output_embeddings", lambda: None)()
