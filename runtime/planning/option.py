"""What a setting says of itself beside its default: how it is given as text, and where it applies.

A dataclass whose fields are made by ``option`` becomes options of a command line by itself
(``model.cli.shared.options``): a new setting is a field.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from pykernels.errors import PykernelsError

_WORDS = {"N": "a number", "GIB": "a number of GiB"}
"""Metavars as a sentence names them."""
SAME: Any = object()
"""Marks that a field's own default is shown as its text."""


@dataclass(frozen=True)
class Option:
    """One setting as a command line has it.

    Attributes:
        help: one sentence or two; ``metavar``: what may be given, such as "N|auto".
        kind: type of the value: str, int, float or bool (a flag).
        text: the default as it is given, where that is not the field's.
        shown: in place of the default, in the help.
        least: of a number; ``most``: likewise.
        read: makes the field's value of what is given; ValueError for what cannot be one.
        no_gpu: values that need no GPU, the others do; None: all.
        on_ref: whether those are for the device "ref", too.
        eager: whether it is for Hugging Face's own forward, too.
    """

    help: str
    metavar: str | None = None
    kind: type = str
    text: Any = SAME
    shown: str | None = None
    least: float | None = None
    most: float | None = None
    read: Callable[[Any], Any] = lambda given: given
    no_gpu: tuple[Any, ...] | None = None
    on_ref: bool = False
    eager: bool = False

    @property
    def hint(self) -> str:
        """What may be given, in a sentence."""
        words = (_WORDS.get(word, word) for word in (self.metavar or "another one").split("|"))
        return f"Give {', '.join(words)}"


def option(default: Any, help: str, metavar: str | None = None, **others: Any) -> Any:
    """A dataclass's field that is an ``Option``.

    Args:
        others: of ``Option``.
    """
    return field(default=default, metadata={"option": Option(help, metavar, **others)})


def options_of(cls: type) -> dict[str, Option]:
    """The fields of a dataclass that are options, in order."""
    return {each.name: each.metadata["option"] for each in fields(cls) if "option" in each.metadata}


class SettingError(PykernelsError):
    """A setting has a value that it cannot have, or not here.

    Args:
        name: of the setting; ``value``: that it has.
        hint: what to do about it; other settings are written there as in Python, name="value" or
            kv_disk.
        why: the value is wrong, if it is not by itself; likewise.
    """

    def __init__(self, name: str, value: object, hint: str, why: str = "") -> None:
        self.name, self.why = name, why
        super().__init__(f"{name}={value!r} {why}", hint)

    def typed(self, flags: Mapping[str, str], texts: Mapping[str, object]) -> PykernelsError:
        """The same of a command line's options; itself where the setting is none of them.

        Args:
            flags: by setting, what is typed for it, such as "--kv-dtype"; ``texts``: behind it.
        """
        if self.name not in texts:
            return self

        def as_typed(text: str) -> str:
            text = re.sub(r'(\w+)="([^"]*)"', lambda m: f"{flags.get(m[1], m[1])} {m[2]}", text)
            return re.sub(r"(?<!-)\b\w+_\w+\b", lambda m: flags.get(m[0], m[0]), text)

        cause = f"{flags[self.name]} {texts[self.name]} {as_typed(self.why)}"
        return PykernelsError(cause, as_typed(self.hint))


def check_whole(name: str, value: object, least: int, most: int, wanted: str = "") -> None:
    """Raises SettingError unless a setting is a whole number from ``least`` to ``most``.

    Args:
        wanted: what may be given, where that is not a number alone.
    """
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or not least <= value <= most:  # type: ignore[operator]
        wanted = wanted or f"a whole number from {least} to {most}"
        raise SettingError(name, value, f"Give {wanted}")


def check_number(name: str, value: object, wanted: str, least: float = 0.0) -> None:
    """Raises SettingError unless a setting is a finite number from ``least``."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not least <= value < math.inf:  # type: ignore[operator]
        raise SettingError(name, value, f"Give {wanted}")


def check_one_of(name: str, value: object, choices: Sequence[object]) -> None:
    """Raises SettingError unless a setting is one of the choices."""
    if value not in choices:
        raise SettingError(name, value, f"Give {', '.join(map(str, choices))}")
