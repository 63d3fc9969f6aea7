"""Weights into a running vLLM: complete, checked by name and shape before anything changes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from spec_compile.errors import ConfigError


@dataclass(frozen=True)
class Expected:
    """What one complete update of a model holds."""

    shapes: dict[str, tuple[int, ...]]
    tied: tuple[frozenset[str], ...] = ()
    """Names of one parameter; any of them stands for all."""

    @classmethod
    def of_module(cls, module: nn.Module) -> Expected:
        """Read names from a module."""
        state = module.state_dict(keep_vars=True)
        groups: dict[int, set[str]] = {}
        for name, tensor in state.items():
            groups.setdefault(id(tensor), set()).add(name)
        tied = tuple(frozenset(names) for names in groups.values() if len(names) > 1)
        return cls({name: tuple(tensor.shape) for name, tensor in state.items()}, tied)

    @classmethod
    def of_folder(cls, path: Path) -> Expected:
        """Read names from a checkpoint's safetensors files."""
        shapes: dict[str, tuple[int, ...]] = {}
        for file in sorted(path.glob("*.safetensors")):
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a mapping
                    shapes[name] = tuple(tensors.get_slice(name).get_shape())
        if not shapes:
            raise ConfigError(f"expected safetensors files in {path}, found none")
        return cls(shapes)

    def staged(self, pairs: Iterable[Any]) -> list[tuple[str, Tensor]]:
        """Copy a complete update.

        Raises:
            ConfigError: a name is unknown, double or missing, or a tensor has another shape.
        """
        found: dict[str, Tensor] = {}
        for name, tensor in pairs:
            if name not in self.shapes:
                raise ConfigError(f"weight update: vLLM's model has no {name!r}")
            if name in found:
                raise ConfigError(f"weight update: {name!r} came twice")
            if tuple(tensor.shape) != self.shapes[name]:
                raise ConfigError(
                    f"weight update: {name!r} has shape {tuple(tensor.shape)}, expected {self.shapes[name]}"
                )
            found[name] = tensor.detach().clone()
        missing = [
            name for name in self.shapes if name not in found and not self._alias_of(name, found)
        ]
        if missing:
            raise ConfigError(
                f"weight update is incomplete: {len(missing)} of {len(self.shapes)} tensors are missing, the "
                f"first is {missing[0]!r}; nothing was changed"
            )
        return list(found.items())

    def _alias_of(self, name: str, found: dict[str, Tensor]) -> bool:
        return any(name in names and names & found.keys() for names in self.tied)


def install_policy(worker: Any, update: list[tuple[str, Tensor]]) -> None:
    """Load a target's weights in a worker of vLLM."""
    worker.reload_weights(weights_iterator=iter(update))


@torch.no_grad()
def install_draft(worker: Any, update: list[tuple[str, Tensor]]) -> None:
    """Load a draft's weights in a worker of vLLM, all in one call: its loaders ask for complete sets."""
    model = worker.get_draft_model()
    model.load_weights(iter(update))
    # vLLM has two runners; what a P-EAGLE reads where it knows nothing is kept by a proposer of the older one
    proposer = getattr(worker.model_runner, "drafter", None)
    masked = getattr(proposer, "parallel_drafting_hidden_state_tensor", None)
    if masked is not None and hasattr(model, "mask_hidden"):  # made once, when the draft was loaded
        masked.copy_(model.combine_hidden_states(model.mask_hidden.view(-1)))


def check_own_head(worker: Any) -> None:
    """Refuse a draft whose head vLLM took for the target's: an update of one would overwrite the other.

    Raises:
        ConfigError: they are one.
    """
    target, draft = worker.get_model(), worker.get_draft_model()
    if draft.lm_head is target.lm_head:
        raise ConfigError("vLLM shares the draft's own head with the target's, whose values it has")


def distinct_head(draft: dict[str, Tensor], target_head: Tensor | None) -> dict[str, Tensor]:
    """Nudge one number of a draft's own head that is still a copy of the target's.

    vLLM makes one tensor of two heads that are equal when they are loaded. The next update of the draft brings the
    number back; the nudge is large enough to be seen in bfloat16.
    """
    head = draft.get("lm_head.weight")
    if head is None or target_head is None or head.shape != target_head.shape:
        return draft
    if not torch.equal(head.float(), target_head.to(head.device).float()):
        return draft
    head = head.detach().clone()
    head[0, 0] = head[0, 0] * (1 + 1 / 64) + 1e-6
    return {**draft, "lm_head.weight": head}
