"""A GGUF file, or a split set of them, as a checkpoint: rows of blocks, as they are stored."""

from __future__ import annotations

import functools
import math
import os
import re
from pathlib import Path
from typing import Any

import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from pykernels.errors import PykernelsError

from ..safetensors import DTYPES, Checkpoint, Part, TensorInfo
from .container import Header, read_header
from .names import heads_of, model_name

_SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


class GGUF(Checkpoint):
    """The tensors of a GGUF file or of a split set.

    Its tensors have the file's names and, as dtype, ggml's types. `read` gives floats as they are,
    and uint8 rows of blocks of every other type; the rows of queries and keys, which llama.cpp
    permutes, are in the model's order.

    Attributes:
        metadata: of the first file; ``architecture``: in it.
        names: the model's names by the file's.
    """

    blocks = True

    def __init__(self, path: Path) -> None:
        self.folder = self.path = path
        header = _header_of(path)
        self.metadata = header.metadata
        self.architecture = text(self.metadata, "general.architecture", path)
        self.names = {name: model_name(name, self.architecture) for name in header.tensors}
        self.tensors = {
            name: _as_matrix(info) if self.names[name].endswith("_gate.weight") else info
            for name, info in header.tensors.items()
        }
        self._start()

    def row_bytes(self, info: TensorInfo) -> int:
        """Stored bytes of one row."""
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType[info.dtype]]
        return info.shape[-1] // block * size

    def nbytes(self, part: Part) -> int:
        rows = math.prod(self.shape(part)[:-1])
        return rows * self.row_bytes(self.tensors[part.name])

    def read(self, part: Part) -> torch.Tensor:
        """One freshly allocated CPU tensor: floats in their dtype, or uint8 [..., row bytes]."""
        info, shape, size = self.tensors[part.name], self.shape(part), self.nbytes(part)
        begin = info.start
        if part.expert is not None:
            begin += part.expert * (info.nbytes // info.shape[0])
        if part.rows is not None:
            begin += part.rows[0] * self.row_bytes(info)
        buffer = torch.empty(size, dtype=torch.uint8, device="cpu")
        self._fill(info.file, begin, buffer.numpy().data)
        if info.dtype in DTYPES:
            tensor = buffer.view(DTYPES[info.dtype]).view(shape)
        else:
            tensor = buffer.view(*shape[:-1], self.row_bytes(info))
        heads = heads_of(part.name, self.architecture, self.metadata)
        if heads is None or part.rows is not None:
            return tensor
        # Pairs that turn together are neighbours in the file, half a head apart in the model.
        return tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()


def find_gguf(path: Path) -> Path | None:
    """The GGUF file at a path: itself, or the one that a folder without safetensors holds, the
    first of a split set. None if there is none. Raises `PykernelsError` for a folder of several."""
    if path.is_file() or path.suffix == ".gguf":
        return path
    if not path.is_dir() or any(path.glob("*.safetensors")) or (path / "config.json").is_file():
        return None
    files = sorted(path.glob("*.gguf"))
    firsts = [f for f in files if not (m := _SPLIT.fullmatch(f.name)) or int(m["number"]) == 1]
    if len(firsts) > 1:
        raise PykernelsError(
            f"{path} holds {len(firsts)} GGUF models, {firsts[0].name} and {firsts[1].name} among"
            " them",
            "Give the path of one file",
        )
    return next(iter(firsts or files), None)


def text(metadata: dict[str, Any], key: str, path: Path) -> str:
    """A string of the metadata. Raises `PykernelsError` if it is not there."""
    value = metadata.get(key)
    if not isinstance(value, str):
        raise PykernelsError(f"{path} has no {key} in its metadata", "Convert the model again")
    return value


def _header_of(path: Path) -> Header:
    """The header of a file or of a whole split set."""
    files = _set_of(path)
    headers = [_cached(file, _stamp(file)) for file in files]
    count = headers[0].metadata.get("split.count", 1)
    if count != len(files):
        raise PykernelsError(
            f"{files[0]} is one of {count} files by its metadata, by its name of {len(files)}",
            "Give the files the names that they were written under",
        )
    tensors: dict[str, TensorInfo] = {}
    for number, (file, header) in enumerate(zip(files, headers, strict=True)):
        if header.metadata.get("split.no", 0) != number:
            raise PykernelsError(
                f"{file} is number {header.metadata.get('split.no')} of its set (from 0)",
                "Download the files again, under their own names",
            )
        if twice := tensors.keys() & header.tensors.keys():
            raise PykernelsError(f"{file} has {min(twice)} once more", "Download it again")
        tensors |= header.tensors
    return Header(headers[0].metadata, tensors)


def _set_of(path: Path) -> list[Path]:
    match = _SPLIT.fullmatch(path.name)
    if match is None:
        return [path]
    stem, count = match["stem"], int(match["count"])
    files = [path.with_name(f"{stem}-{i + 1:05d}-of-{count:05d}.gguf") for i in range(count)]
    if absent := [file.name for file in files if not file.is_file()]:
        raise PykernelsError(
            f"{len(absent)} of the {count} files of {path.with_name(stem)} are missing:"
            f" {absent[0]}",
            "Download the missing files",
        )
    return files


def _stamp(file: Path) -> tuple[int, int]:
    try:
        found = os.stat(file)
    except OSError:
        return 0, 0  # what is wrong with it, reading says
    return found.st_mtime_ns, found.st_size


@functools.lru_cache(maxsize=64)
def _cached(file: Path, stamp: tuple[int, int]) -> Header:
    """Config, tokenizer and weights all read the header, which has the whole vocabulary."""
    return read_header(file)


def _as_matrix(info: TensorInfo) -> TensorInfo:
    """A linear with one output, which is stored as a vector."""
    shape = (1, *info.shape) if len(info.shape) == 1 else info.shape
    return TensorInfo(info.file, info.dtype, shape, info.start, info.stop)
