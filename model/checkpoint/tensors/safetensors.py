"""A folder of safetensors files: headers checked first, then read one tensor at a time.

File format: 8 bytes little-endian header length, a JSON header `{name: {dtype, shape,
data_offsets}}`, then the data (safetensors specification 0.x). Reads go through `pread` into new
memory, never through a mapping, so that resident memory is what was asked for and no more.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from pykernels.errors import PykernelsError

from ...startup.given import few

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

_MAX_HEADER = 100_000_000  # the specification's own limit
_LONGEST = 255  # bytes of a file's name
_READ = 1 << 30  # bytes a `pread`: Linux moves at most 2 GiB - 4 KiB in one call
_AGAIN = "Download the checkpoint again"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one stored tensor lies. `dtype` is the format's own name (`BF16`, `F8_E4M3` ...)."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A contiguous part of a stored tensor: all of it, or rows of one expert's matrix.

    `expert` picks one matrix of a fused [E, N, K] tensor, `rows` a range of the matrix's rows.
    """

    name: str
    expert: int | None = None
    rows: tuple[int, int] | None = None


class Checkpoint:
    """The tensors of a checkpoint folder.

    `Checkpoint(folder)` reads every header and compares it with the file's size, so an absent or
    half-downloaded shard is found before anything is loaded. Raises `PykernelsError`.

    Attributes:
        names: names of the model's by stored ones, where those are another house's (GGUF).
        blocks: whether other tensors than floats are rows of blocks with their scales inside.
        mismatch: what to do where tensors are not those of the configuration's model.
    """

    names: Mapping[str, str] = MappingProxyType({})
    blocks = False
    mismatch = "Check that config.json belongs to this checkpoint, or download it again"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # The single file comes first, as in transformers: an index beside it may be stale.
        sharded = (folder / INDEX).is_file() and not (folder / SINGLE).is_file()
        self.tensors = _indexed(folder) if sharded else _single(folder)
        self._start()

    def _start(self) -> None:
        """Starts with no file open."""
        self._files: dict[Path, int] = {}
        self._opening = threading.Lock()  # several threads read

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def fitted(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        """A tensor that the model needs in that shape; it has its own if that is another one."""
        return self.tensors[name]

    def shape(self, part: TensorSlice) -> tuple[int, ...]:
        """Shape of `part` as `read` will return it."""
        shape = self.tensors[part.name].shape
        if part.expert is not None:
            shape = shape[1:]
        if part.rows is not None:
            shape = (part.rows[1] - part.rows[0], *shape[1:])
        return shape

    def nbytes(self, part: TensorSlice) -> int:
        """Bytes that `read` will read."""
        info = self.tensors[part.name]
        return info.nbytes // max(1, math.prod(info.shape)) * math.prod(self.shape(part))

    def read(self, part: TensorSlice) -> torch.Tensor:
        """One freshly allocated CPU tensor, in its stored dtype."""
        info = self.tensors[part.name]
        shape = self.shape(part)
        begin, size = info.start, self.nbytes(part)
        if part.expert is not None:
            begin += part.expert * (info.nbytes // info.shape[0])
        if part.rows is not None and part.rows[1] > part.rows[0]:
            begin += part.rows[0] * (size // (part.rows[1] - part.rows[0]))
        buffer = torch.empty(size, dtype=torch.uint8, device="cpu")
        self._fill(info.file, begin, buffer.numpy().data)
        return buffer.view(DTYPES[info.dtype]).view(shape)

    def _fill(self, file: Path, begin: int, view: memoryview) -> None:
        with self._opening:
            if file not in self._files:
                try:
                    self._files[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
                except OSError as error:
                    raise _unreadable(file, error) from None
        done = 0
        while done < len(view):
            try:
                got = os.preadv(self._files[file], [view[done : done + _READ]], begin + done)
            except OSError as error:
                raise _unreadable(file, error) from None
            if got == 0:
                raise PykernelsError(f"{file} ended while it was being read", _AGAIN)
            done += got


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in `file`; `PykernelsError` if it is missing, unreadable or no object."""
    try:
        value = json.loads(file.read_bytes(), parse_constant=_constant)
    except FileNotFoundError:
        raise PykernelsError(
            f"{file} is missing", "Give the folder of a Hugging Face checkpoint"
        ) from None
    except OSError as error:
        raise _unreadable(file, error) from None
    except (ValueError, RecursionError) as error:
        raise PykernelsError(f"{file} is not valid JSON: {error}", _AGAIN) from None
    if not isinstance(value, dict):
        raise PykernelsError(f"{file} holds no JSON object", _AGAIN)
    return value


def _constant(word: str) -> float:
    """What Python takes for a number in JSON and the specification does not: infinities alone."""
    if word == "NaN":
        raise ValueError("it holds NaN")
    return float(word)


def _single(folder: Path) -> dict[str, TensorInfo]:
    if (folder / SINGLE).is_file():
        return header(folder / SINGLE)[0]
    if (folder / "packed.json").is_file():
        raise PykernelsError(
            f"{folder} is a packed cache, which the engine alone reads",
            "Leave out --eager, or give the checkpoint that it was made from",
        )
    if pickles := sorted([*folder.glob("*.bin"), *folder.glob("*.bin.index.json")]):
        raise PykernelsError(
            f"{folder} holds weights in another format than safetensors: {pickles[0].name}",
            "Get the safetensors or GGUF version of the checkpoint",
        )
    if any(folder.glob("*.safetensors")):
        raise PykernelsError(f"{folder} has safetensors files but no {INDEX}", _AGAIN)
    raise PykernelsError(f"{folder} has neither {SINGLE} nor {INDEX}", _AGAIN)


def _indexed(folder: Path) -> dict[str, TensorInfo]:
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise PykernelsError(f"{folder / INDEX} has no weight_map", _AGAIN)
    if not all(isinstance(shard, str) for shard in weight_map.values()):
        raise PykernelsError(f"{folder / INDEX} has a weight_map of other than file names", _AGAIN)
    shards = sorted(set(weight_map.values()))
    for shard in shards:
        whole = shard and Path(shard).name == shard and shard.isprintable()
        if not whole or len(shard.encode()) > _LONGEST:
            raise PykernelsError(
                f"{folder / INDEX} names a file that cannot be in its folder: {shard[:60]!r}",
                _AGAIN,
            )
    if absent := [shard for shard in shards if not (folder / shard).is_file()]:
        raise PykernelsError(
            f"{len(absent)} of {len(shards)} shards of {folder} are missing: {few(absent)}",
            "Download the missing files",
        )
    headers = {shard: header(folder / shard)[0] for shard in shards}
    if lost := [name for name, shard in weight_map.items() if name not in headers[shard]]:
        raise PykernelsError(
            f"{folder / INDEX} names {len(lost)} tensors that their shard does not hold, "
            f"the first is {lost[0][:200]} in {weight_map[lost[0]]}",
            "Download the index and the shards again, from one revision",
        )
    return {name: headers[shard][name] for name, shard in weight_map.items()}


def header(file: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """One file's tensors and its own metadata, the header checked against the file's size.

    Raises `PykernelsError`.
    """
    try:
        return _parsed(file)
    except OSError as error:
        raise _unreadable(file, error) from None


def _unreadable(file: Path, error: OSError) -> PykernelsError:
    return PykernelsError(
        f"{file} cannot be read: {error.strerror}", "Check its permissions and the disk"
    )


def _parsed(file: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER):
            raise PykernelsError(f"{file} is cut off or no safetensors file ({size} bytes)", _AGAIN)
        try:
            entries = json.loads(stream.read(length))
            metadata = dict(entries.pop("__metadata__", None) or {})
            base = 8 + length
            tensors = {name: _info(file, base, entry) for name, entry in entries.items()}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise PykernelsError(f"{file} has a broken safetensors header", _AGAIN) from None
    promised = max((info.stop for info in tensors.values()), default=base)
    if size != promised:
        state = "half-downloaded" if size < promised else "corrupt"
        raise PykernelsError(
            f"{file} is {state}: it has {size} bytes and its header promises {promised}", _AGAIN
        )
    end = base
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
        if info.start != end:  # the specification allows neither gaps nor overlaps
            raise PykernelsError(
                f"{file} is corrupt: {name} begins at byte {info.start}, the tensor before it ends"
                f" at {end}",
                _AGAIN,
            )
        end = info.stop
    return tensors, metadata


def _info(file: Path, base: int, entry: dict[str, Any]) -> TensorInfo:
    shape, (start, stop) = tuple(entry["shape"]), entry["data_offsets"]
    if not all(type(n) is int and n >= 0 for n in (*shape, start, stop)):
        raise ValueError("sizes and offsets are whole numbers")
    info = TensorInfo(file, str(entry["dtype"]), shape, base + start, base + stop)
    known = DTYPES.get(info.dtype)
    if stop < start or (known is not None and math.prod(shape) * known.itemsize != info.nbytes):
        raise ValueError("offsets and shape disagree")
    return info
