"""A stand-in for the target in a capture: the sizes and taps of a model whose layers stay with Megatron."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from spec_compile.errors import PlanError
from spec_compile.ir.edit import ancestors
from spec_compile.lowering import Lowered

_LAYER = re.compile(r"target\.layers\.(\d+)\.scale")
FINAL = "target.norm.scale"
HIDDEN = -1
"""Number of the hidden state after the final norm, beside those of taps."""


class Scale(nn.Module):
    """The smallest layer: one factor, whose name in the graph tells which layer a value has passed."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), device=device, dtype=dtype))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return what came in."""
        return hidden_states * self.scale


class Silhouette(nn.Module):
    """What capture asks of a target: an embedding, layers, a head; its tables take no memory.

    Only the draft's part of what it lowers to is run, on values of the real model.
    """

    def __init__(
        self,
        num_layers: int,
        vocab_size: int,
        hidden_size: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        shape = (vocab_size, hidden_size)
        self.embed_tokens = nn.Embedding(*shape, device="meta")
        self.embed_tokens.weight = _table(shape, device, dtype)
        self.layers = nn.ModuleList(Scale(device, dtype) for _ in range(num_layers))
        self.norm = Scale(device, dtype)
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False, device="meta")
        self.lm_head.weight = _table(shape, device, dtype)
        self.config = SimpleNamespace(
            num_hidden_layers=num_layers, hidden_size=hidden_size, vocab_size=vocab_size
        )
        self.config.get_text_config = _Itself(self.config)

    def forward(self, input_ids: Tensor, **unused: Any) -> SimpleNamespace:
        """Run as transformers models do: hidden states, and logits for the numeric check."""
        states = [self.embed_tokens(input_ids)]
        for layer in self.layers:
            states.append(layer(states[-1]))
        states[-1] = self.norm(states[-1])
        return SimpleNamespace(
            last_hidden_state=states[-1],
            hidden_states=tuple(states),
            logits=self.lm_head(states[-1]),
        )

    def get_decoder(self) -> nn.Module:
        """The trunk is the model itself."""
        return self

    def get_input_embeddings(self) -> nn.Module:
        """The embedding."""
        return self.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        """The head."""
        return self.lm_head

    def set_attn_implementation(self, name: str) -> None:
        """Nothing attends here."""


class _Itself:
    """Answers a call with one object; unlike a closure it survives a deep copy."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self) -> Any:
        return self.value


def _table(shape: tuple[int, int], device: torch.device, dtype: torch.dtype) -> nn.Parameter:
    """One stored number, seen as a whole table."""
    return nn.Parameter(torch.zeros((), device=device, dtype=dtype).expand(shape), False)


def crossing_values(lowered: Lowered) -> list[int]:
    """Tell what the draft's program reads of the target: taps by their number of layers, or `HIDDEN`.

    Raises:
        PlanError: it reads something else, which no layer boundary gives.
    """
    output = next(iter(reversed(lowered.programs.policy.graph.nodes)))
    found = []
    for value in output.args[0][2:]:
        names = [str(node.target) for node in ancestors([value]) if node.op == "get_attr"]
        layers = [int(m.group(1)) for m in map(_LAYER.fullmatch, names) if m is not None]
        found.append(HIDDEN if FINAL in names else max(layers, default=-1) + 1)
        width = value.meta["val"].shape[-1]
        if width != lowered.programs.policy.get_parameter(lowered.facts.embedding_name).shape[1]:
            raise PlanError(
                f"the draft reads {value} of {width} elements a row from the target; only whole residual streams "
                "and the final hidden state can be taken from a Megatron model"
            )
    return found
