"""What a directory of blocks holds, for people: by model, and whether it is whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pykernels.errors import PykernelsError

from ...kv_cache.page_store import Kind
from .block import SUFFIXES, why_damaged
from .directory import ABOUT, MARKER, blocks, blocks_of, check_ours, folders, remove_stale


@dataclass(frozen=True)
class ModelBlocks:
    """The blocks of one model.

    Attributes:
        name: of its folder; ``model``: of the model.
        pages, states: how many blocks there are.
        used: nanoseconds since 1970 at which one was of use last; 0: there is none.
    """

    name: str
    model: str
    pages: int
    states: int
    nbytes: int
    used: int


@dataclass(frozen=True)
class Damaged:
    """A file that is no whole block, and why."""

    path: Path
    why: str


def opened(root: Path) -> None:
    """Raises PykernelsError unless it is a directory of blocks of this version."""
    hint = "Give the directory that a server has as --kv-disk"
    try:
        if check_ours(root):
            return
    except OSError as error:
        raise PykernelsError(f"{root} cannot be read: {error.strerror}", hint) from error
    raise PykernelsError(f"{root} holds no blocks of the KV cache", hint)


def by_model(root: Path) -> list[ModelBlocks]:
    """Lists what is there of each model; what was of use last comes first."""
    found = []
    for folder in folders(root):
        files = list(blocks_of(folder))
        states = sum(file.path.endswith(SUFFIXES[Kind.STATE]) for file in files)
        nbytes, used = sum(f.nbytes for f in files), max((f.used for f in files), default=0)
        about = (folder.name, _model(folder), len(files) - states, states, nbytes, used)
        found.append(ModelBlocks(*about))
    return sorted(found, key=lambda each: -each.used)


def damaged(root: Path) -> Iterator[Damaged | None]:
    """For each block of all models, what is wrong with it; None: nothing is."""
    for file in blocks(root):
        path = Path(file.path)
        with suppress(FileNotFoundError):
            try:
                why = why_damaged(path.read_bytes(), path.name)
            except OSError as error:
                why = error.strerror or str(error)
            yield None if why is None else Damaged(path, why)


def clear(root: Path) -> int:
    """Removes all blocks, of any version; a server that uses them computes anew.

    Returns:
        Bytes that they took.

    Raises:
        PykernelsError: it is no directory of blocks, or some cannot be removed.
    """
    if not (root / MARKER).is_file():
        hint = "Give the directory that a server has as --kv-disk"
        raise PykernelsError(f"{root} holds no blocks of the KV cache", hint)
    nbytes = 0
    try:
        remove_stale(root, 0)
        for file in blocks(root):
            with suppress(FileNotFoundError):
                Path(file.path).unlink()
                nbytes += file.nbytes
        for folder in folders(root):
            (folder / ABOUT).unlink(missing_ok=True)
            with suppress(OSError):  # a server has just written to it
                folder.rmdir()
        if not folders(root):
            (root / MARKER).unlink(missing_ok=True)
    except OSError as error:
        raise PykernelsError(
            f"blocks in {root} cannot be removed: {error.strerror}", "Remove them as their owner"
        ) from error
    return nbytes


def _model(folder: Path) -> str:
    with suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads((folder / ABOUT).read_bytes())["model"])
    return "unknown"
