"""A GGUF file, or a split set of them, as a checkpoint: rows of blocks, as they are stored."""

from __future__ import annotations

import functools
import math
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pykernels.errors import PykernelsError

from ...startup.given import few
from ..tensors.safetensors import DTYPES, Checkpoint, TensorInfo, TensorSlice
from .container import Header, read_header
from .fused import split_qkv
from .metadata import Metadata
from .names import change_of, heads_of, model_name
from .types import BLOCK_OF

SUFFIX = ".gguf"
TOWER = "mmproj"
"""What llama.cpp puts into the name of a vision tower's file."""
_SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
_FOREIGN = ("*.safetensors", "*.safetensors.index.json", "packed.json")
"""Files of a folder that is a checkpoint of another kind, GGUF files in it or not."""


class GGUF(Checkpoint):
    """The tensors of a GGUF file or of a split set.

    Its tensors have the file's names and, as dtype, ggml's types. `read` gives floats as they are,
    and uint8 rows of blocks of every other type; the rows of queries and keys, which llama.cpp
    permutes, are in the model's order, and what else it changes (`names.change_of`) is as in the
    model.

    Attributes:
        metadata: of the first file; ``architecture``: in it.
        hyperparameters: the metadata under the architecture's name.
        names: the model's names by the file's.
    """

    blocks = True
    mismatch = "Download the file again, or convert the model again with a newer llama.cpp"

    def __init__(self, path: Path) -> None:
        self.folder = self.path = path
        header = _header_of(path)
        self.metadata = header.metadata
        self.architecture = text(self.metadata, "general.architecture", path)
        self.hyperparameters = Metadata(self.metadata, self.architecture, path)
        self.tensors = split_qkv(header.tensors, self.hyperparameters)
        self.names = {name: model_name(name, self.architecture) for name in self.tensors}
        self._start()

    def fitted(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        """As in `Checkpoint`. ggml knows no outermost dimensions of 1, a convolution has none in
        its middle, and the first files with ``attn_k_b`` and ``attn_v_b`` have the heads' matrices
        one below the other."""
        info = self.tensors[name]
        stacked = len(info.shape) == 2 and len(shape) == 3 and info.shape[-1] == shape[-1]
        if _without_ones(info.shape) == _without_ones(shape) or (
            stacked and info.shape[0] == shape[0] * shape[1]
        ):
            info = self.tensors[name] = replace(info, shape=shape)
        return info

    def row_bytes(self, info: TensorInfo) -> int:
        """Stored bytes of one row."""
        return _nbytes(info, info.shape[-1])

    def nbytes(self, part: TensorSlice) -> int:
        return _nbytes(self.tensors[part.name], math.prod(self.shape(part)))

    def read(self, part: TensorSlice) -> torch.Tensor:
        """One freshly allocated CPU tensor: floats in their dtype, or uint8 [..., row bytes]."""
        info, shape, size = self.tensors[part.name], self.shape(part), self.nbytes(part)
        begin = info.start
        if part.expert is not None:
            begin += part.expert * (info.nbytes // info.shape[0])
        if part.rows is not None:
            first, stop = part.rows
            begin += first * (size // (stop - first))
        buffer = torch.empty(size, dtype=torch.uint8, device="cpu")
        self._fill(info.file, begin, buffer.numpy().data)
        if info.dtype in DTYPES:
            tensor = buffer.view(DTYPES[info.dtype]).view(shape)
        else:
            tensor = buffer.view(*shape[:-1], self.row_bytes(info))
        if (change := change_of(part.name, self.architecture)) is not None:
            return change(tensor)
        heads = heads_of(part.name, self.hyperparameters)
        if heads is None or part.rows is not None:
            return tensor
        # Pairs that turn together are neighbours in the file, half a head apart in the model.
        return tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()


def find_gguf(path: Path) -> Path | None:
    """The GGUF file at a path: itself, or the one that a folder holds, the first of a split set.

    A folder may have a config.json beside it, which is not read: everything is in the file; and a
    vision tower's file (`TOWER`), which is left out. None
    for a folder without one, of safetensors, or that is a packed cache, and for a config.json.
    Raises `PykernelsError` for a folder of several.
    """
    if not path.is_dir():
        is_file = path.is_file() and path.suffix.lower() != ".json"
        return path if is_file or path.suffix.lower() == SUFFIX else None
    if any(file for pattern in _FOREIGN for file in path.glob(pattern)):
        return None
    files = sorted(f for f in path.iterdir() if f.suffix.lower() == SUFFIX and f.is_file())
    files = [f for f in files if TOWER not in f.name.lower()] or files
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
    end = f"-of-{count:05d}{path.suffix}"
    files = [path.with_name(f"{stem}-{i + 1:05d}{end}") for i in range(count)]
    if absent := [file.name for file in files if not file.is_file()]:
        raise PykernelsError(
            f"{len(absent)} of the {count} files of {path.with_name(stem)} are missing:"
            f" {few(absent)}",
            "Download the missing files",
        )
    return files


def _stamp(file: Path) -> tuple[int, int]:
    try:
        stat = os.stat(file)
    except OSError:
        return 0, 0  # what is wrong with it, reading says
    return stat.st_mtime_ns, stat.st_size


@functools.lru_cache(maxsize=64)
def _cached(file: Path, stamp: tuple[int, int]) -> Header:
    """Config, tokenizer and weights all read the header, which has the whole vocabulary."""
    return read_header(file)


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without its dimensions of 1, but for the innermost."""
    return (*(size for size in shape[:-1] if size != 1), *shape[-1:])


def _nbytes(info: TensorInfo, count: int) -> int:
    """Stored bytes of so many numbers of a tensor, whole blocks."""
    block, size = BLOCK_OF[info.dtype]
    return count // block * size
