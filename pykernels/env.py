"""The `PYKERNELS_*` flags: one typed, documented table, read live, with a scoped override.

    from pykernels.env import env

    env.kernel                          # "auto", or what PYKERNELS_KERNEL says
    with env.override(kernel="generic"):
        ...                             # every thread of this process sees "generic"

A flag is read when it is asked for, so a change of `os.environ` counts at once. An override wins
over the environment. A bad value raises `PykernelsError` where it is read and names the flag.
`pykernels doctor` and the README print `table()`: there is no second list of flags.
"""

from __future__ import annotations

import difflib
import os
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

from .errors import PykernelsError

V = TypeVar("V")


def _path(text: str) -> Path:
    if not text.strip():
        raise ValueError("it is empty")
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ValueError("it begins with the home of a user who has none here") from None


def _name(text: str) -> str:
    if not text.strip():
        raise ValueError("it is empty")
    return text.strip()


def _hidden_features(text: str) -> frozenset[str]:
    names = [part.strip() for part in text.split(",") if part.strip()]
    if bad := [name for name in names if not name.startswith("-") or len(name) == 1]:
        raise ValueError(f"{bad[0]!r} does not start with '-': features can only be hidden")
    return frozenset(name[1:].lower() for name in names)


def _count(text: str) -> int | None:
    if not text.strip():
        return None
    try:
        count = int(text)
    except ValueError:
        raise ValueError("it is no whole number") from None
    if count < 1:
        raise ValueError("it is below 1")
    return count


_HOUR = 3.6e9  # microseconds; as nanoseconds on top of a clock it is far from 2**63


def _microseconds(text: str) -> float | None:
    if not text.strip():
        return None
    try:
        value = float(text)
    except ValueError:
        raise ValueError("it is no number") from None
    if not 0 <= value <= _HOUR:
        raise ValueError("it is negative, no number or above an hour")
    return value


def _automatic(text: str) -> str:
    if text not in ("auto", "off"):
        raise ValueError("it is neither auto nor off")
    return text


def _switch(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("it is neither 0 nor 1")
    return text == "1"


@dataclass(frozen=True)
class FlagInfo:
    """One row of the table: `name` in the environment, `default`, `value` now, what it means."""

    name: str
    default: str
    value: str
    doc: str


class Flag(Generic[V]):
    """Descriptor of one flag: attribute `x` of `Env` is `parse(text of PYKERNELS_X)`."""

    def __init__(self, parse: Callable[[str], V], default: str, doc: str, hint: str) -> None:
        self.parse, self.default, self.doc, self.hint = parse, default, doc, hint

    def __set_name__(self, owner: type, attribute: str) -> None:
        self.attribute, self.name = attribute, f"PYKERNELS_{attribute.upper()}"

    @overload
    def __get__(self, env: None, owner: type) -> Flag[V]: ...
    @overload
    def __get__(self, env: Env, owner: type) -> V: ...

    def __get__(self, env: Env | None, owner: type) -> Flag[V] | V:
        return self if env is None else self.read(env.text(self))

    def __set__(self, env: Env, value: object) -> None:
        raise AttributeError(f"use env.override({self.attribute}=...), which ends with its block")

    def read(self, text: str) -> V:
        """The typed value of `text`; raises `PykernelsError` naming the flag if it is a bad one."""
        try:
            return self.parse(text)
        except ValueError as error:
            cause = f"{self.name}={text!r} cannot be used: {error}"
            raise PykernelsError(cause, self.hint) from None


class Env:
    """The flags of this process (use the one instance, `env`)."""

    cache_dir = Flag(
        _path,
        "~/.cache/pykernels",
        "Folder of compiled kernels, and of figures: gemm-from-*, gpu-plans, read-roof-*,"
        " prefill-rates-*.json, transformers-modules.json.",
        "Give it a folder that you may write to",
    )
    kernel = Flag(
        _name,  # ``registry`` knows which there are, and refuses any other
        "auto",
        "Expert kernel that `auto` stands for; `doctor` lists them.",
        "Set it to a kernel's name, or unset it",
    )
    debug = Flag(
        _switch,
        "0",
        "1: kernels on one thread, with checked indices, compiled anew in each process.",
        "Set it to 0 or 1",
    )
    isa = Flag(
        _hidden_features,
        "",
        "CPU features to hide, for tests: a list like -avx512bf16,-avx512vnni.",
        "Write a comma list of CPU features, each with a leading '-'",
    )
    threads = Flag(
        _count,
        "",
        "Worker threads of the experts; empty: one on each physical core.",
        "Set it to a whole number from 1, or unset it",
    )
    spin_us = Flag(
        _microseconds,
        "",
        "Microseconds that an idle worker spins; empty: 50, with a GPU 1000.",
        "Set it to microseconds, 0 to 3.6e9, or unset it",
    )
    hugepages = Flag(
        _switch,
        "1",
        "1: packed weights ask for 2 MiB pages; 0: for 4 KiB pages.",
        "Set it to 0 or 1",
    )
    fake_numa = Flag(
        _count,
        "",
        "Made-up NUMA nodes to deal the cores over, to try things; empty: none.",
        "Set it to a whole number from 1, or unset it",
    )
    peer_access = Flag(
        _automatic,
        "auto",
        "auto: GPUs write to each other's memory where they can; off: they meet in main memory.",
        "Set it to auto or off",
    )

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self._environ = os.environ if environ is None else environ
        self._overrides: dict[str, str] = {}
        self._lock = threading.Lock()

    def text(self, flag: Flag[Any]) -> str:
        """Returns the override of `flag`, else the environment's text, else the default."""
        if (text := self._overrides.get(flag.attribute)) is not None:
            return text
        return self._environ.get(flag.name, flag.default)

    @contextmanager
    def override(self, **values: object) -> Iterator[Env]:
        """Set flags for the length of a `with` block, for all threads of the process.

        A value is what the environment would hold, as `str(value)` (True and False count as 1 and
        0, None as empty). Raises `PykernelsError` for an unknown flag or a bad value, before
        anything is set. Blocks nest; only what the block named is put back when it ends.
        """
        flags = {flag.attribute: flag for flag in self.flags()}
        texts: dict[str, str] = {}
        for attribute, value in values.items():
            if attribute not in flags:
                known = ", ".join(flags)
                raise PykernelsError(f"There is no flag {attribute!r}", f"Use one of {known}")
            texts[attribute] = _as_text(value)
            flags[attribute].read(texts[attribute])
        with self._lock:
            before = {attribute: self._overrides.get(attribute) for attribute in texts}
            self._overrides = {**self._overrides, **texts}
        try:
            yield self
        finally:
            with self._lock:
                rest = {k: v for k, v in self._overrides.items() if k not in before}
                self._overrides = rest | {k: v for k, v in before.items() if v is not None}

    @classmethod
    def flags(cls) -> list[Flag[Any]]:
        """The descriptors in the order of the table."""
        return [flag for flag in vars(cls).values() if isinstance(flag, Flag)]

    def table(self) -> list[FlagInfo]:
        """One row a flag, for `doctor` and the README. A bad value is shown, not raised."""
        return [FlagInfo(f.name, f.default, self.text(f), f.doc) for f in self.flags()]

    def check(self) -> None:
        """Read every flag once; raises `PykernelsError` at the first bad value.

        A variable `PYKERNELS_*` that is no flag is a warning that names the nearest one.
        """
        for flag in self.flags():
            flag.read(self.text(flag))
        known = [flag.name for flag in self.flags()]
        for name in sorted(self._environ):
            if name.startswith("PYKERNELS_") and name not in known:
                (near,) = difflib.get_close_matches(name, known, 1, 0.0)
                warnings.warn(f"{name} is no flag and does nothing; {near} is one", stacklevel=1)


def _as_text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, (frozenset, set, list, tuple)):
        return ",".join(f"-{str(part).removeprefix('-')}" for part in sorted(map(str, value)))
    return str(value)


env = Env()


def check_temporary_folder() -> None:
    """Raises ``PykernelsError`` where no folder for temporary files can be written."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        raise PykernelsError(
            "there is no folder for temporary files that can be written (TMPDIR, /tmp, /var/tmp)",
            "Free some space there, or point TMPDIR at a folder that you may write to",
        ) from None
