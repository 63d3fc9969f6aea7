"""Draft checkpoints on disk: ``config.json`` and ``model.safetensors``, under public names."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from spec_compile.errors import ConfigError

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def write(path: str | Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a checkpoint folder; each file appears whole or not at all."""
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    whole = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    partial = folder / f"{WEIGHTS}.partial"
    save_file(whole, partial, metadata={"format": "pt"})
    os.replace(partial, folder / WEIGHTS)
    partial = folder / f"{CONFIG}.partial"
    partial.write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf-8")
    os.replace(partial, folder / CONFIG)


def read_config(path: str | Path) -> dict[str, Any]:
    """Read ``config.json``.

    Raises:
        ConfigError: the file is missing or is not a JSON object.
    """
    file = Path(path) / CONFIG
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read a draft's configuration from {file}: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{file} must hold a JSON object, found {type(config).__name__}")
    return config


def read_tensors(path: str | Path) -> dict[str, Tensor]:
    """Read all tensors of a checkpoint, sharded or not, to the CPU.

    Raises:
        ConfigError: the folder holds no safetensors weights.
    """
    folder = Path(path)
    if (folder / INDEX).exists():
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        files = sorted(set(index["weight_map"].values()))
    else:
        files = [WEIGHTS]
    tensors: dict[str, Tensor] = {}
    for name in files:
        if not (folder / name).exists():
            raise ConfigError(
                f"expected {folder / name}, found none; convert other formats to safetensors"
            )
        tensors.update(load_file(folder / name))
    return tensors
