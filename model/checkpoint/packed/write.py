"""Files of a packed cache, written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from pykernels.errors import PykernelsError

from ..tensors.safetensors import DTYPES

ALIGN = 4096
"""Tensors begin at multiples of it, so that they lie at page boundaries when a file is mapped."""
PAD = "pad."
"""Beginning of the names of the gaps: the format allows none that no tensor fills."""
_CHUNK = 16 << 20
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def write_file(path: Path, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """A safetensors file of these tensors, contiguous and on the CPU, in this order.

    Its metadata also gets "sha256", the digest of every tensor (`digest`).

    Raises:
        PykernelsError: the disk is full, or refuses.
    """
    parts = [_bytes(tensor) for tensor in tensors.values()]
    digests = dict(zip(tensors, map(digest, parts), strict=True))
    header: dict[str, Any] = {"__metadata__": metadata | {"sha256": json.dumps(digests)}}
    data: list[memoryview | bytes] = []
    at = 0
    for (name, tensor), part in zip(tensors.items(), parts, strict=True):
        if gap := -at % ALIGN:
            entry = {"dtype": "U8", "shape": [gap], "data_offsets": [at, at + gap]}
            header[f"{PAD}{len(header)}"] = entry
            data.append(bytes(gap))
            at += gap
        end = at + len(part)
        shape = list(tensor.shape)
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": shape, "data_offsets": [at, end]}
        data.append(part)
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % ALIGN)  # the format allows spaces there
    replace_file(path, [len(text).to_bytes(8, "little"), text, *data])


def replace_file(path: Path, data: Iterable[memoryview | bytes]) -> None:
    """Writes a file beside `path`, on the disk before it takes that name.

    Raises:
        PykernelsError: the disk is full, or refuses.
    """
    new = path.with_name(path.name + ".part")
    try:
        with new.open("wb", buffering=0) as stream:
            for part in data:
                view = memoryview(part)
                while view:
                    view = view[stream.write(view[:_CHUNK]) :]
            os.fsync(stream.fileno())
        new.rename(path)
        _sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise PykernelsError(
            f"{path} cannot be written: {error.strerror}",
            "Free some space and run it again: it goes on where it was"
            if full
            else "Check the folder's permissions and the disk",
        ) from None


def digest(data: memoryview) -> str:
    """SHA-256 of the SHA-256s of every 16 MiB, which all cores work on."""
    starts = range(0, len(data), _CHUNK)

    def one(start: int) -> bytes:
        return hashlib.sha256(data[start : start + _CHUNK]).digest()

    if len(starts) < 2:
        parts = [one(start) for start in starts]
    else:
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            parts = list(pool.map(one, starts))
    return hashlib.sha256(b"".join(parts)).hexdigest()


def _bytes(tensor: torch.Tensor) -> memoryview:
    flat: memoryview = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
    return flat


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
