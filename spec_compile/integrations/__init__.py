"""Bridges to other packages; each is imported when it is first used."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from .vllm import VllmEngine


def vllm_engine(
    target: nn.Module | str | PathLike[str],
    draft: nn.Module | str | PathLike[str] | None = None,
    **options: Any,
) -> VllmEngine:
    """Start vLLM in this process as a rollout engine; see `integrations.vllm.VllmEngine` for the options.

    Raises:
        ConfigError: vLLM is not installed, or cannot serve the models.
    """
    from .vllm import VllmEngine

    return VllmEngine(target, draft, **options)
