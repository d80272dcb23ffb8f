"""Files of a packed cache as memory: mapped read-only and shared, never copied."""

from __future__ import annotations

import contextlib
import json
import mmap
import warnings
from pathlib import Path
from typing import Any

import torch

from pykernels.env import env
from pykernels.errors import PykernelsError

from ..tensors.safetensors import DTYPES, header
from .manifest import AGAIN, Manifest, read_manifest

_LINE = 64
"""Bytes to a multiple of which kernels want weights."""


class MappedFile:
    """One file.

    Attributes:
        memory: uint8, all of it; read-only, whatever torch says.
        metadata: as `write_file` got it, and "sha256".
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.tensors, self.metadata = header(path)
            with path.open("rb") as stream:
                flags = mmap.MAP_SHARED
                whole = mmap.mmap(stream.fileno(), 0, flags=flags, prot=mmap.PROT_READ)
            if env.hugepages:
                with contextlib.suppress(OSError):  # a kernel without them refuses
                    whole.madvise(mmap.MADV_HUGEPAGE)
        except PykernelsError as error:
            raise PykernelsError(error.cause, AGAIN) from None
        except OSError as error:
            raise PykernelsError(f"{path} cannot be mapped: {error.strerror}", AGAIN) from None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that it cannot be written
            self.memory = torch.frombuffer(whole, dtype=torch.uint8)

    def tensor(self, name: str) -> torch.Tensor:
        """One of its tensors. Raises `PykernelsError` for what is not there or not aligned."""
        info = self.tensors.get(name)
        if info is None or info.dtype not in DTYPES:
            raise PykernelsError(f"{self.path} has no {name}", AGAIN)
        found = self.memory[info.start : info.stop]
        if found.data_ptr() % _LINE:
            raise PykernelsError(f"{name} of {self.path} does not begin at 64 bytes", AGAIN)
        return found.view(DTYPES[info.dtype]).view(info.shape)


class PackedFolder:
    """A complete cache, mapped; nothing of its weights is read yet.

    Attributes:
        manifest: its manifest.
        objects: key -> the file that has it, and how it is described there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest: Manifest = read_manifest(folder)
        self.files = [MappedFile(folder / name) for name in self.manifest.files]
        self.objects: dict[str, tuple[MappedFile, dict[str, Any]]] = {}
        for file in self.files:
            for key, about in described(file).items():
                self.objects[key] = file, about

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.memory.nbytes for file in self.files)


def described(file: MappedFile, what: str = "objects") -> dict[str, Any]:
    """A JSON object of a file's metadata. Raises `PykernelsError` if there is none."""
    try:
        description = json.loads(file.metadata[what])
    except (KeyError, ValueError):
        description = None
    if not isinstance(description, dict):
        raise PykernelsError(f"{file.path} does not say what is in it", AGAIN)
    return description
