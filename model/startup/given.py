"""What lies at a path that is given as a model, before anything of it is read.

Importing this imports no torch and no transformers, so that a wrong path is refused at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pykernels.errors import PykernelsError

CONFIG, PACKED, GGUF, WEIGHTS = "config.json", "packed.json", ".gguf", ".safetensors"
_POINTER = b"version https://git-lfs"
_LONGEST_POINTER = 1024
"""Bytes: Git LFS takes no larger file for one."""


def check_given(path: Path, weights: bool = True) -> None:
    """Says what is wrong with a path that exists.

    Args:
        weights: False: a config.json alone is enough.

    Raises:
        PykernelsError: a folder that is no checkpoint, one file of a checkpoint instead of its
            folder, or files that Git LFS has not fetched.
    """
    try:
        files = sorted(path.iterdir()) if path.is_dir() else [path]
    except OSError as error:
        raise PykernelsError(
            f"{path} cannot be read: {error.strerror}", "Check its permissions and the disk"
        ) from None
    if path.is_dir():
        if not any(f.name in (CONFIG, PACKED) or f.suffix.lower() == GGUF for f in files):
            if any(f.suffix.lower() == WEIGHTS for f in files):
                raise PykernelsError(f"{path / CONFIG} is missing", "Download it too")
            raise PykernelsError(
                f"{path} is no checkpoint: there is no {CONFIG} and no GGUF file in it",
                "Give the folder that has them, or download them",
            )
    elif (path.parent / CONFIG).is_file() and path.suffix.lower() in (WEIGHTS, ".json"):
        if weights or path.name != CONFIG:
            raise PykernelsError(
                f"{path} is one file of a checkpoint", f"Give its folder: {path.parent}"
            )
    elif path.suffix.lower() == ".json":
        raise PykernelsError(f"{path} is not called {CONFIG}", f"Rename it to {CONFIG}")
    if pointer := next(filter(_is_pointer, files), None):
        raise PykernelsError(
            f"{pointer} is a pointer of Git LFS, and not the file itself",
            "Run git lfs pull in its folder, or download the file",
        )


def few(names: Sequence[str]) -> str:
    """The first of some names, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _is_pointer(file: Path) -> bool:
    try:
        if not file.is_file() or file.stat().st_size > _LONGEST_POINTER:
            return False
        with file.open("rb") as stream:
            return stream.read(len(_POINTER)) == _POINTER
    except OSError:  # what is wrong with it, reading says, if it is read
        return False
