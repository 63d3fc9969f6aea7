"""Whether the values of a configuration have the types that its fields declare."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from spec_compile.errors import ConfigError


def check_types(kind: Any, values: Mapping[str, Any]) -> None:
    """Refuse values of another type than their field's: files are edited by hand.

    Args:
        kind: a dataclass with a name in ``family``.
        values: of some of its fields.

    Raises:
        ConfigError: names the field, its type and the value.
    """
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if field.name in values and not _fits(values[field.name], hints[field.name]):
            raise ConfigError(
                f"{kind.family}: {field.name} must be {field.type}, found {values[field.name]!r}"
            )


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a declared type; JSON has lists for tuples, and 1 for 1.0."""
    origin, inside = get_origin(hint), get_args(hint)
    if origin is UnionType:
        return any(_fits(value, each) for each in inside)
    if origin is tuple:
        listed = isinstance(value, Sequence) and not isinstance(value, str)
        return listed and all(_fits(entry, inside[0]) for entry in value)
    if hint in (int, float):
        number = isinstance(value, Integral if hint is int else Real)
        return number and not isinstance(value, bool) and bool(math.isfinite(value))
    return bool(isinstance(value, origin or hint))
