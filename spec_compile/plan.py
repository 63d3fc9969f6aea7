"""The plan: how many devices, split which way, and with which numerics."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import ConfigError, did_you_mean
from .options import check_known, refuse_unknown

SCHEDULES = {
    "gpipe": "gpipe",
    "1f1b": "1f1b",
    "interleaved": "interleaved",
    "zero_bubble": "zero_bubble",
    # torch.distributed.pipelining's own names
    "ScheduleGPipe": "gpipe",
    "Schedule1F1B": "1f1b",
    "ScheduleInterleaved1F1B": "interleaved",
    "ScheduleInterleavedZeroBubble": "zero_bubble",
}
ONE_STAGE = ("gpipe", "1f1b")
"""Schedules of one stage a rank; the others run two by default."""
CHOICES: dict[str, tuple[str, ...]] = {
    "schedule": tuple(SCHEDULES),
    "cp_strategy": ("auto", "ring", "all_gather", "pass_q"),
    "attention": (
        "auto",
        "cudnn",
        "triton",
        "flash_attn_2",
        "flash_attn_3",
        "flash_attn_4",
        "aten_flash",
        "aten_cpu",
        "math",
    ),
    "tap_transport": ("auto", "loopback", "shm", "cuda_ipc", "nixl", "c10d"),
    "recompute": ("none", "layers"),
    "backend": ("eager", "inductor"),
    "reduce_dtype": ("float32", "float64", "bfloat16"),
}
PARAM_DTYPES = ("float64", "float32", "bfloat16", "float16")
NOT_YET: dict[str, tuple[Any, ...]] = {
    "fsdp": (True,),
    "backend": ("inductor",),
    "reduce_dtype": ("bfloat16", "float64"),
}
UNSUPPORTED = {
    "tp": "tensor parallelism is not supported; split layers with pp and rows with cp",
    "ep": "expert parallelism is not supported; each rank holds all experts of its layers (split them with pp)",
}
"""Sizes that other libraries have."""


@refuse_unknown(UNSUPPORTED)
@dataclass(frozen=True, kw_only=True)
class Plan:
    """How to run one joint training step on ``dp * cp * pp`` ranks. Frozen; every field has a default.

    Raises:
        ConfigError: a value is unknown, out of range, or not supported yet.
    """

    dp: int = 1
    """Data-parallel replicas; each is given its own batch."""
    cp: int = 1
    """Context-parallel ranks that share the rows of one batch."""
    pp: int = 1
    """Pipeline-parallel ranks that share the layers of the target."""
    micro_batches: int = 1
    """Parts that the documents of a batch are dealt to."""
    max_tokens_per_micro_batch: int | None = None
    """When given, the number of micro-batches is chosen per step instead, the same on all ranks."""
    schedule: str = "1f1b"
    stages_per_rank: int | None = None
    """Stages of each pipeline rank, which go round the ranks; None: 1, or 2 where a schedule can."""
    cp_strategy: str = "auto"
    """How queries meet keys of other ranks: "ring" and "all_gather" move keys and values, "pass_q" query rows."""
    attention: str = "auto"
    tap_transport: str = "auto"
    fsdp: bool = False
    recompute: str = "none"
    """"layers": the backward computes decoder layers again, from their inputs and attention outputs."""
    backend: str = "eager"
    draft_weight: float = 1.0
    """Factor on the draft's gradients; the reported draft loss does not carry it."""
    param_dtype: str | None = None
    """Compute type of weights and activations; None keeps the parameters' own."""
    reduce_dtype: str = "float32"
    seed: int = 0
    deterministic: bool = False
    timeout_s: float = 120.0
    """Deadline inside a started step, and for a peer without a heartbeat, in seconds."""
    entry_timeout_s: float = 3600.0
    """How late a living peer may come to a step, in seconds."""
    verify: bool = True

    def __post_init__(self) -> None:
        for name in ("dp", "cp", "pp", "micro_batches"):
            _check_count(name, getattr(self, name))
        for name in ("max_tokens_per_micro_batch", "stages_per_rank"):
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name))
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ConfigError(f"Plan.seed must be an int, found {self.seed!r}")
        if not isinstance(self.fsdp, bool):
            raise ConfigError(
                f"Plan.fsdp must be False, the only one implemented, found {self.fsdp!r}"
            )
        for name in ("deterministic", "verify"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(
                    f"Plan.{name} must be True or False, found {getattr(self, name)!r}"
                )
        for name, choices in CHOICES.items():
            _check_choice(name, getattr(self, name), choices)
        if self.param_dtype is not None:
            _check_choice("param_dtype", self.param_dtype, PARAM_DTYPES)
        for name in ("timeout_s", "entry_timeout_s", "draft_weight"):
            _check_number(name, getattr(self, name), positive=name != "draft_weight")
        self._refuse_not_yet()

    def _refuse_not_yet(self) -> None:
        object.__setattr__(self, "schedule", SCHEDULES[self.schedule])
        for name, values in NOT_YET.items():
            if getattr(self, name) in values:
                raise ConfigError(
                    f"Plan.{name}={getattr(self, name)!r} is part of the contract but not implemented yet; "
                    f"use {dataclasses.fields(self)[_field_index(name)].default!r}"
                )
        if self.schedule in ONE_STAGE and self.stages_per_rank not in (None, 1):
            raise ConfigError(
                f"Plan.stages_per_rank={self.stages_per_rank} needs a schedule with several stages a rank, found "
                f"{self.schedule!r}; use 'interleaved' or 'zero_bubble', or leave it None"
            )

    @property
    def world_size(self) -> int:
        """Ranks that this plan needs."""
        return self.dp * self.cp * self.pp

    @property
    def num_stages(self) -> int:
        """Pipeline stages over all ranks."""
        return self.pp * (self.stages_per_rank or (1 if self.schedule in ONE_STAGE else 2))

    def text(self) -> str:
        """One JSON line with every field, in declaration order: what ranks compare."""
        return json.dumps(dataclasses.asdict(self))

    def digest(self) -> str:
        """Hash of `text`."""
        return hashlib.blake2b(self.text().encode(), digest_size=12).hexdigest()

    @classmethod
    def from_toml(cls, path: str | Path) -> Plan:
        """Read a plan from a TOML file whose keys (optionally under ``[plan]``) are this class's fields.

        Raises:
            ConfigError: the file cannot be read, or holds an unknown key or a bad value.
        """
        try:
            data = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"cannot read a plan from {path}: {error}") from error
        data = data.get("plan", data)
        for key in data:
            check_known(cls, key, UNSUPPORTED, where=f" in {path}")
        return cls(**data)


def _field_index(name: str) -> int:
    return [field.name for field in dataclasses.fields(Plan)].index(name)


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"Plan.{name} must be an int of at least 1, found {value!r}")


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(
            f"Plan.{name} must be one of {', '.join(choices)}, found {value!r}{did_you_mean(value, choices)}"
        )


def _check_number(name: str, value: object, *, positive: bool) -> None:
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not ok or (positive and not value > 0):  # type: ignore[operator]
        kind = "a finite number above 0" if positive else "a finite number"
        raise ConfigError(f"Plan.{name} must be {kind}, found {value!r}")
