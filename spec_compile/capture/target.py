"""What capture needs to know of a target: its layers, embedding, head, and how to run its trunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from spec_compile.errors import CaptureError
from spec_compile.ir import ops
from spec_compile.pairing import why_not_causal

UNSUPPORTED_HEADS = ("final_logit_softcapping", "logit_scale", "logits_scaling")


@dataclass(frozen=True)
class TargetView:
    """A causal language model of transformers, taken apart by its public accessors."""

    model: Any
    trunk: nn.Module
    """Token ids to hidden states after the final norm."""
    layers: nn.ModuleList
    embedding: nn.Embedding
    head: nn.Linear

    @classmethod
    def of(cls, model: Any) -> TargetView:
        """Find the parts, or say which one is missing.

        Raises:
            CaptureError: the model is no causal LM, or has no layer list, embedding, or plain linear head.
        """
        name = type(model).__name__
        if not hasattr(model, "get_decoder") or not hasattr(model, "config"):
            raise CaptureError(
                f"{name} is not a transformers causal language model: expected get_decoder(), "
                "get_input_embeddings(), get_output_embeddings() and config"
            )
        problem = why_not_causal(model)
        if problem is not None:
            raise CaptureError(problem)
        trunk = model.get_decoder()
        config = model.config.get_text_config()
        layers = [
            m
            for m in trunk.modules()
            if isinstance(m, nn.ModuleList) and len(m) == config.num_hidden_layers
        ]
        if not layers:
            raise CaptureError(
                f"{name}: found no ModuleList of config.num_hidden_layers={config.num_hidden_layers} decoder layers"
            )
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        if not isinstance(embedding, nn.Embedding):
            raise CaptureError(
                f"{name}: input embedding must be an nn.Embedding, found {type(embedding).__name__}"
            )
        if not isinstance(head, nn.Linear) or head.bias is not None:
            raise CaptureError(
                f"{name}: output head must be an nn.Linear without bias, found {head!r}"
            )
        for key in UNSUPPORTED_HEADS:
            if getattr(config, key, None) not in (None, 1, 1.0):
                raise CaptureError(
                    f"{name}: config.{key}={getattr(config, key)} changes the logits; not supported yet"
                )
        return cls(model, trunk, layers[0], embedding, head)

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers)

    def hook_boundaries(self, residuals: dict[int, Tensor]) -> None:
        """Mark the residual stream before each layer and after the last, and keep it in ``residuals`` [T, D]."""

        def mark(hidden: Tensor, layer: int) -> Tensor:
            hidden = ops.boundary(hidden, layer)
            residuals[layer] = hidden.squeeze(0)
            return hidden

        def before(layer: int) -> Any:
            def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
                if args:
                    return (mark(args[0], layer), *args[1:]), kwargs
                return args, {**kwargs, "hidden_states": mark(kwargs["hidden_states"], layer)}

            return hook

        def after(module: nn.Module, args: Any, output: Any) -> Any:
            if isinstance(output, tuple):
                return (mark(output[0], self.num_layers), *output[1:])
            return mark(output, self.num_layers)

        for i, layer in enumerate(self.layers):
            layer.register_forward_pre_hook(before(i), with_kwargs=True)
        self.layers[-1].register_forward_hook(after)

    def run(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Hidden states after the final norm, [T, D]."""
        output = self.trunk(
            input_ids=tokens[None], position_ids=positions[None], use_cache=False, return_dict=True
        )
        hidden: Tensor = output.last_hidden_state.squeeze(0)
        return hidden
