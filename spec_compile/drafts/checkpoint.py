"""Draft checkpoints on disk: ``config.json`` and ``model.safetensors``, under public names."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from spec_compile.errors import ConfigError

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAPPINGS = (
    "transformer_layer_config", "dflash_config", "eagle_config", "rope_scaling", "rope_parameters",
)  # fmt: skip
LISTS: dict[str, type] = {
    "architectures": str,
    "layer_types": str,
    "eagle_aux_hidden_state_layer_ids": int,
    "aux_hidden_state_layer_ids": int,
    "target_layer_ids": int,
}
"""Fields of a configuration that hold more than one value, at whatever depth, and of what."""


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
    _check_containers(file, config)
    return config


def _check_containers(file: Path, config: Mapping[str, Any]) -> None:
    for name, value in config.items():
        if isinstance(value, dict):
            _check_containers(file, value)
        if value is None or (name in MAPPINGS and isinstance(value, dict)):
            continue
        if name in MAPPINGS:
            raise ConfigError(f"{file}: {name} must be an object, found {value!r}")
        entry = LISTS.get(name)
        if entry is not None and not (
            isinstance(value, list) and all(type(each) is entry for each in value)
        ):
            raise ConfigError(f"{file}: {name} must be a list of {entry.__name__}, found {value!r}")


def read_tensors(path: str | Path) -> dict[str, Tensor]:
    """Read all tensors of a checkpoint, sharded or not, to the CPU.

    Raises:
        ConfigError: the folder holds no safetensors weights, or a file cannot be read.
    """
    folder = Path(path)
    files = _shards(folder / INDEX) if (folder / INDEX).exists() else [WEIGHTS]
    tensors: dict[str, Tensor] = {}
    for name in files:
        if not (folder / name).exists():
            raise ConfigError(
                f"expected {folder / name}, found none; convert other formats to safetensors"
            )
        try:
            tensors.update(load_file(folder / name))
        except SafetensorError as error:
            raise ConfigError(
                f"cannot read {folder / name}: {error}; it is incomplete or no safetensors file: write or download it "
                "again"
            ) from error
    return tensors


def _shards(index: Path) -> list[str]:
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return sorted({str(name) for name in names})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{index} must hold an object with a weight_map, from names of tensors to files: {error!r}"
        ) from error
