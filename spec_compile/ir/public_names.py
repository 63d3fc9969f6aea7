"""Names of parameters as in the plain model, whatever a module was wrapped in."""

from __future__ import annotations

from torch import Tensor, nn

WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
"""Attributes under which ``torch.compile`` and checkpoint wrappers hold the module that they wrap."""


def public_name(name: str) -> str:
    """Leave wrappers out of a parameter's path, so that any reader of checkpoints knows the name."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def checkpoint_of(module: nn.Module) -> dict[str, Tensor]:
    """Give a module's state dict under public names; its tensors, not copies."""
    held = module.state_dict(keep_vars=True)
    return {public_name(name): tensor for name, tensor in held.items()}
