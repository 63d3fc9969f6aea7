"""Dataclasses of options say what an unknown one may mean."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from .errors import ConfigError, did_you_mean

T = TypeVar("T")


def refuse_unknown(
    elsewhere: Mapping[str, str] | None = None, otherwise: str = ""
) -> Callable[[type[T]], type[T]]:
    """Make a dataclass refuse unknown keywords by a ConfigError that names the nearest known one.

    Args:
        elsewhere: names that the class does not have, such as those of other libraries, and what to do instead.
        otherwise: what to do with a name that is like no other.
    """

    def wrap(kind: type[T]) -> type[T]:
        made: Any = kind.__init__

        @functools.wraps(made)
        def init(self: Any, *args: Any, **options: Any) -> None:
            for name in options:
                check_known(kind, name, elsewhere or {}, otherwise=otherwise)
            made(self, *args, **options)

        kind.__init__ = init  # type: ignore[method-assign]
        return kind

    return wrap


def check_known(
    kind: type, name: str, elsewhere: Mapping[str, str], *, where: str = "", otherwise: str = ""
) -> None:
    """Refuse a name that is no option of a dataclass.

    Args:
        kind: the dataclass.
        name: what was given.
        elsewhere: names that it does not have, and what to do instead.
        where: where it was given, for the message.
        otherwise: what to do with a name that is like no other.

    Raises:
        ConfigError: says what was meant, what to do, or what is known.
    """
    known = [field.name for field in dataclasses.fields(kind) if field.init]
    if name in known:
        return
    hint = f": {elsewhere[name]}" if name in elsewhere else did_you_mean(name, known)
    if not hint:
        hint = f"; known keys: {', '.join(known)}" + (f"; {otherwise}" if otherwise else "")
    raise ConfigError(f"unknown key {name!r}{where} of a {kind.__name__}{hint}")
