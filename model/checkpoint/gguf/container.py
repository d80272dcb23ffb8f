"""The header of one GGUF file: metadata, and where tensors lie. Every size is checked against the
file before it is believed.

Layout (github.com/ggml-org/ggml, ``docs/gguf.md``), little endian: "GGUF", version u32, numbers of
tensors and of metadata u64; metadata as key, type u32, value; tensors as name, dimensions (the
fastest first), type u32, offset u64 into the data, which begins at the next multiple of
``general.alignment``. Strings are a u64 length and bytes.

Types and their block sizes are those of the package ``gguf``. Its ``GGUFReader`` makes a NumPy view
of every token of a vocabulary (3.6 s for 49,152) and trusts what it reads, so it is not used.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGUFValueType

from pykernels.errors import PykernelsError

from ..tensors.safetensors import TensorInfo
from .types import BLOCK_OF, NAME_OF

_AGAIN = "Download the file again"
_VERSIONS = (2, 3)
_MAX_DIMS = 4
_LEAST_TENSOR, _LEAST_VALUE = 8 + 4 + 8 + 4 + 8, 8 + 4 + 1
"""Bytes of the smallest entry of a tensor and of a value."""

_SCALARS = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
}


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says of itself.

    `metadata`: numbers, strings and lists of them by their keys; `tensors`: by the file's names,
    shapes outermost first, `dtype` the type's name in ggml (`F32`, `Q4_K` ...).
    """

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def read_header(file: Path) -> Header:
    """Parse and check a file's header. Raises `PykernelsError`."""
    try:
        with file.open("rb") as stream:
            if not file.stat().st_size:
                raise PykernelsError(f"{file} is empty", _AGAIN)
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(file, data).header()
    except FileNotFoundError:
        raise PykernelsError(f"There is no file {file}", "Give the path of a GGUF file") from None
    except OSError as error:
        raise PykernelsError(
            f"{file} cannot be read: {error.strerror}", "Check its permissions and the disk"
        ) from None


class _Reader:
    """A position in the bytes of a file."""

    def __init__(self, file: Path, data: mmap.mmap) -> None:
        self.file, self.data, self.at, self.size = file, data, 0, len(data)

    def header(self) -> Header:
        if self.data[:4] != b"GGUF":
            raise PykernelsError(f"{self.file} is no GGUF file", "Give a file that llama.cpp reads")
        self.at = 4
        version = self.unpack("<I")
        if version not in _VERSIONS:
            raise PykernelsError(
                f"{self.file} is of GGUF version {version}, versions 2 and 3 (little endian) are"
                " read",
                "Convert the model again",
            )
        tensors, values = self.unpack("<Q"), self.unpack("<Q")
        self.need(tensors * _LEAST_TENSOR + values * _LEAST_VALUE)
        metadata: dict[str, Any] = {}
        for _ in range(values):
            key = self.name()
            if key in metadata:
                raise self.broken(f"has {key} twice")
            metadata[key] = self.value(self.unpack("<I"), key)
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise self.broken(f"has the alignment {alignment!r}")
        entries = [self.tensor() for _ in range(tensors)]
        start = -(-self.at // alignment) * alignment
        found: dict[str, TensorInfo] = {}
        for name, shape, kind, offset in entries:
            if name in found:
                raise self.broken(f"has {name} twice")
            if offset % alignment:
                raise self.broken(f"has {name} at an offset that is not aligned")
            nbytes = _nbytes(shape, kind)
            found[name] = TensorInfo(
                self.file, kind, shape, start + offset, start + offset + nbytes
            )
        self._check_places(found)
        return Header(metadata, found)

    def tensor(self) -> tuple[str, tuple[int, ...], str, int]:
        """(name, shape, type, offset) of the next tensor."""
        name, dims = self.name(), self.unpack("<I")
        if not 1 <= dims <= _MAX_DIMS:
            raise self.broken(f"has {name} with {dims} dimensions")
        shape = tuple(self.unpack("<Q") for _ in range(dims))[::-1]
        number, offset = self.unpack("<I"), self.unpack("<Q")
        kind = NAME_OF.get(number)
        if kind is None:
            raise PykernelsError(
                f"{self.file} has {name} in the type {number}, which is not known",
                "Get the model in Q8_0, Q6_K, Q5_K_M or Q4_K_M",
            )
        block, _ = BLOCK_OF[kind]
        if not all(shape) or shape[-1] % block:
            raise self.broken(f"has {name} of the shape {list(shape)}, which {kind} has not")
        return name, shape, kind, offset

    def value(self, number: int, key: str) -> Any:
        """The next value, of the type of that number."""
        kind = self.kind(number, key)
        if kind is GGUFValueType.STRING:
            return self.text()
        if kind is not GGUFValueType.ARRAY:
            return self.numbers(_SCALARS[kind], 1)[0]
        kind, count = self.kind(self.unpack("<I"), key), self.unpack("<Q")
        if kind is GGUFValueType.STRING:
            self.need(8 * count)
            return [self.text() for _ in range(count)]
        if kind is GGUFValueType.ARRAY:
            raise self.broken(f"has arrays of arrays in {key}")
        return self.numbers(_SCALARS[kind], count)

    def kind(self, number: int, key: str) -> GGUFValueType:
        try:
            return GGUFValueType(number)
        except ValueError:
            raise self.broken(f"has {key} of the type {number}, which is not known") from None

    def numbers(self, dtype: str, count: int) -> list[Any]:
        size = np.dtype(dtype).itemsize * count
        return list(np.frombuffer(self.take(size), dtype).tolist())

    def text(self) -> str:
        return self.take(self.unpack("<Q")).decode("utf-8", errors="replace")

    def name(self) -> str:
        """A key of the metadata, or the name of a tensor."""
        try:
            return self.take(self.unpack("<Q")).decode("utf-8")
        except UnicodeDecodeError:
            raise self.broken("has a name that is no UTF-8 text") from None

    def unpack(self, form: str) -> int:
        return int(struct.unpack(form, self.take(struct.calcsize(form)))[0])

    def take(self, count: int) -> bytes:
        self.need(count)
        self.at += count
        return self.data[self.at - count : self.at]

    def need(self, count: int) -> None:
        """Raise `PykernelsError` unless so many bytes are left."""
        if count > self.size - self.at:
            raise self.broken(f"promises {count} bytes from byte {self.at} on")

    def broken(self, what: str) -> PykernelsError:
        return PykernelsError(
            f"{self.file} is cut off or corrupt: its header {what} (the file has {self.size}"
            " bytes)",
            _AGAIN,
        )

    def _check_places(self, tensors: dict[str, TensorInfo]) -> None:
        """Raise `PykernelsError` for tensors beyond the end of the file, or that overlap."""
        end = self.at
        for name, info in sorted(tensors.items(), key=lambda item: item[1].start):
            if info.start < end:
                raise self.broken(f"has {name} where another tensor lies")
            end = info.stop
        if end > self.size:
            raise PykernelsError(
                f"{self.file} is half-downloaded: it has {self.size} bytes and its header promises"
                f" {end}",
                _AGAIN,
            )


def _nbytes(shape: tuple[int, ...], kind: str) -> int:
    block, size = BLOCK_OF[kind]
    return math.prod(shape) // block * size
