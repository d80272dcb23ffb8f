"""The values of a GGUF file's metadata, checked for what they must be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pykernels.errors import PykernelsError

_ABSENT = object()
_MOST = 1 << 31
"""No size of a model is as large."""
_SOME_ATTEND = ("lfm2", "lfm2moe")
"""Architectures in which layers without attention have 0 heads of keys."""
_UNEQUAL = ("gemma4",)
"""Architectures whose layers may have unequal heads."""


class Metadata:
    """Lookups by key, without the architecture in front of it.

    Where llama.cpp takes a number for all layers or a list of one for each, such a list counts as
    the number that all layers have.

    Every method raises `PykernelsError` for a value of another kind, for a list of unequal numbers,
    and for a key that is not there unless it has a default.
    """

    def __init__(self, values: dict[str, Any], architecture: str, path: Path) -> None:
        self._values, self._path, self.architecture = values, path, architecture

    def has(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self._values

    def count(self, key: str, default: Any = _ABSENT) -> Any:
        """A whole number."""
        value = self._get(key, default)
        if value is default:
            return default
        if type(value) is not int or not 0 <= value < _MOST:
            raise self.wrong(key, value)
        return value

    def size(self, key: str, default: Any = _ABSENT) -> Any:
        """A whole number from 1 on."""
        found = self.count(key, default)
        if found == 0:
            raise self.wrong(key, found)
        return found

    def number(self, key: str, default: Any = _ABSENT) -> Any:
        """A finite number."""
        value = self._get(key, default)
        if value is default:
            return default
        if type(value) not in (int, float) or not abs(value) < 1e30:
            raise self.wrong(key, value)
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if type(value) is not bool:
            raise self.wrong(key, value)
        return value

    def flags(self, key: str) -> list[bool] | None:
        """One flag for each layer; None if they are not there."""
        if not self.has(key):
            return None
        value = self.value(key)
        if not isinstance(value, list) or any(type(one) not in (bool, int) for one in value):
            raise self.wrong(key, value)
        return [bool(one) for one in value]

    def word(self, key: str, default: str) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, value)
        return value

    def value(self, key: str) -> Any:
        """The value as it is stored; None if it is not there."""
        return self._values.get(f"{self.architecture}.{key}")

    def by_layer(self, key: str, default: int) -> list[int]:
        """A whole number for each layer: those of a list, or one for all."""
        layers, value = self.size("block_count"), self.value(key)
        if not self.has(key) or not isinstance(value, list):
            return [self.count(key, default)] * layers
        if len(value) != layers or any(type(n) is not int or not 0 <= n < _MOST for n in value):
            raise self.wrong(key, value)
        return value

    def wrong(self, key: str, value: Any) -> PykernelsError:
        return PykernelsError(
            f"{self._path} has the {self.architecture}.{key} {str(value)[:60]!r}, which cannot be",
            "Convert the model again",
        )

    def unsupported(self, key: str, value: Any, wanted: str) -> PykernelsError:
        """For a value that a model can have, and none that is run."""
        return PykernelsError(
            f"{self._path} has the {self.architecture}.{key} {str(value)[:60]!r}, only {wanted} is"
            " supported",
            "Run the file with llama.cpp, or get another model",
        )

    def _get(self, key: str, default: Any) -> Any:
        value = self._values.get(f"{self.architecture}.{key}", default)
        if value is _ABSENT:
            raise PykernelsError(
                f"{self._path} has no {self.architecture}.{key} in its metadata",
                "Convert the model again with a newer llama.cpp",
            )
        if isinstance(value, list) and value:
            if any(one != value[0] for one in value):
                raise self.unsupported(key, value, "one value for all layers")
            return value[0]
        return value


def kv_heads(meta: Metadata) -> int:
    """Heads of keys and values of every layer with attention; where they may be unequal of the
    first one."""
    key = "attention.head_count_kv"
    heads: int = meta.size("attention.head_count")
    if meta.architecture in _UNEQUAL:
        return meta.by_layer(key, heads)[0]
    if meta.architecture not in _SOME_ATTEND:
        found: int = meta.size(key, heads)
        return found
    counts = {count for count in meta.by_layer(key, heads) if count}
    if len(counts) != 1:
        raise meta.unsupported(key, meta.value(key), "one value for all layers with attention")
    return counts.pop()
