"""Draft checkpoints on disk: ``config.json`` and ``model.safetensors``, under public names."""

from __future__ import annotations

import json
import os
import shutil
import uuid
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
    """Write a checkpoint folder; each file appears whole or not at all.

    Several processes may write the same draft at once: each has partial files of its own.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    whole = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    text = json.dumps(dict(config), indent=2) + "\n"
    own = uuid.uuid4().hex  # process ids repeat on the hosts of a shared folder
    weights, settings = (folder / f"{name}.{own}.partial" for name in (WEIGHTS, CONFIG))
    try:
        settings.write_text(text, encoding="utf-8")
        save_file(whole, weights, metadata={"format": "pt"})
        shutil.copymode(settings, weights)  # the umask's; safetensors makes files private
        os.replace(weights, folder / WEIGHTS)
        os.replace(settings, folder / CONFIG)
    finally:
        for partial in (weights, settings):
            partial.unlink(missing_ok=True)


def read_config(path: str | Path) -> dict[str, Any]:
    """Read ``config.json``.

    Raises:
        ConfigError: there is no such folder, or the file is missing or is not a JSON object.
    """
    if not Path(path).is_dir():
        raise ConfigError(
            f"expected a folder with {CONFIG} and {WEIGHTS}, found no folder {str(path)!r}; only local folders are "
            "read: download a published draft first, and pass its folder"
        )
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
