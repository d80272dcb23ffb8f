"""A directory of blocks: bounded, the least recently used go first, shared by processes.

    DIR/pykernels-kv.json         {"version": 1}: the directory is one of ours
    DIR/<model>/model.json        what the model is, for people
    DIR/<model>/<key>.page        a block (``block``), by its page's key; <key>.state likewise
    DIR/<model>/new-<pid>-<n>     one that is being written

A block has its name when it is whole: it is written under another one and renamed. What a killed
process or a power cut leaves behind is a new-file, or a block whose checksum is wrong. A file's
time of modification is when its block was of use last. Nothing else is locked or kept: each process
looks at the directory from time to time, and a block that is gone is a miss.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pykernels.errors import PykernelsError

from .block import SUFFIXES, VERSION

MARKER = "pykernels-kv.json"
ABOUT = "model.json"
NEW = "new-"
_STALE_SECONDS = 600
"""A new-file that is older belongs to a process that is no more."""
_LIMIT = 32 << 30


class BlockFile(NamedTuple):
    """A block as it lies in the directory."""

    path: str
    nbytes: int
    used: int
    """Nanoseconds since 1970."""


def prepared(root: Path, limit: int | None = None) -> int:
    """Makes a directory of blocks, or sees that it is one.

    Args:
        limit: bytes that it is to have; None: 32 GiB, or half of what there is room for.

    Returns:
        That many.

    Raises:
        PykernelsError: it cannot be made or written, holds something else, is another version's,
            or has no space for so much.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        marked = check_ours(root)
        if not marked:
            write_json(root / MARKER, {"version": VERSION})
        probe = root / f"{NEW}{os.getpid()}"
        probe.touch()
        probe.unlink()
        disk = os.statvfs(root)
    except OSError as error:
        raise PykernelsError(
            f"{root} cannot hold blocks of the KV cache: {error.strerror}",
            "Give a directory in which this user may write",
        ) from error
    room = disk.f_bavail * disk.f_frsize + sum(file.nbytes for file in blocks(root))
    if limit is None:
        return min(_LIMIT, room // 2)
    if limit > room:
        raise PykernelsError(
            f"{root} is to have {limit / 2**30:.1f} GiB of blocks, and its disk has room for"
            f" {room / 2**30:.1f}",
            "Ask for less, or give a directory on another disk",
        )
    return limit


def check_ours(root: Path) -> bool:
    """Whether a directory is marked as one of blocks; an empty one is not.

    Raises:
        PykernelsError: it holds something else, or is another version's.
        OSError: it cannot be read.
    """
    marker = root / MARKER
    if not marker.exists():
        if any(not name.startswith((NEW, "lost+found")) for name in os.listdir(root)):
            raise PykernelsError(
                f"{root} holds other files than blocks of the KV cache",
                "Give an empty directory, or a new one",
            )
        return False
    try:
        version = json.loads(marker.read_bytes())["version"]
    except (ValueError, KeyError, TypeError):
        version = None
    if version != VERSION:
        raise PykernelsError(
            f"{root} holds blocks of version {version}, and this program writes version {VERSION}",
            f"Remove them with `pykernels kv clear {root}`, or give another directory",
        )
    return True


def folders(root: Path) -> list[Path]:
    """Of models, by name."""
    found = (Path(entry.path) for entry in os.scandir(root) if entry.is_dir(follow_symlinks=False))
    return sorted(path for path in found if _is_hex(path.name))


def blocks(root: Path) -> Iterator[BlockFile]:
    """The blocks of all models."""
    for folder in folders(root):
        with suppress(FileNotFoundError):
            yield from blocks_of(folder)


def blocks_of(folder: Path) -> Iterator[BlockFile]:
    """The blocks of one model."""
    for entry in os.scandir(folder):
        if is_block(entry.name):
            with suppress(FileNotFoundError):
                stat = entry.stat(follow_symlinks=False)
                yield BlockFile(entry.path, stat.st_size, stat.st_mtime_ns)


def remove_stale(root: Path, seconds: float = _STALE_SECONDS) -> None:
    """Removes new-files of processes that are no more: those that are as old as that."""
    before = time.time() - seconds
    for folder in (root, *folders(root)):
        for entry in os.scandir(folder):
            with suppress(FileNotFoundError):
                if entry.name.startswith(NEW) and entry.stat().st_mtime <= before:
                    os.unlink(entry.path)


def is_block(name: str) -> bool:
    """Whether a file's name is that of a block."""
    return name.endswith(tuple(SUFFIXES.values())) and _is_hex(name.partition(".")[0])


def _is_hex(name: str) -> bool:
    return len(name) == 32 and all(c in "0123456789abcdef" for c in name)


def write_json(path: Path, value: object) -> None:
    """Writes a file whole or not at all."""
    new = path.with_name(f"{NEW}{os.getpid()}-{path.name}")
    new.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(new, path)
