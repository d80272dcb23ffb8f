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
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from pykernels.errors import PykernelsError

from .block import SUFFIXES, VERSION, BlockName

MARKER = "pykernels-kv.json"
ABOUT = "model.json"
NEW = "new-"
_STALE_SECONDS = 600
"""A new-file that is older belongs to a process that is no more."""
_LOOK_SECONDS = 10
_KEPT = 0.95
"""Of the limit, when blocks had to go."""
_UNSEEN = 1 / 32
"""Of the limit: bytes that are written between two looks at what other processes have written."""
_LIMIT = 32 << 30
_IOV = 1000
"""Buffers of one ``preadv``: Linux takes 1,024."""


Found = Literal["whole", "gone", "damaged"]


class BlockFile(NamedTuple):
    """A block as it lies in the directory."""

    path: str
    nbytes: int
    used: int
    """Nanoseconds since 1970."""


@dataclass
class ModelFolder:
    """The blocks of one model, as one process sees them.

    Args:
        root: the directory, which ``prepared`` has seen.
        limit: bytes of all files of the directory.
        fingerprint: 16 bytes, of the model.
        about: of the model, for people.
    """

    root: Path
    limit: int
    fingerprint: bytes
    about: dict[str, object]

    def __post_init__(self) -> None:
        self.path = self.root / self.fingerprint.hex()
        self._make()
        self._written = 0
        self._looked = 0.0
        self._total = 0
        self._unseen = 0
        self.names: set[str] = set()
        self.look()
        self.trim()

    def _make(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        _write_json(self.path / ABOUT, self.about)
        _write_json(self.root / MARKER, {"version": VERSION})

    def look(self) -> None:
        """Finds the blocks that others have written or removed."""
        self._looked = time.monotonic()
        found = os.scandir(self.path) if self.path.is_dir() else ()
        self.names = {entry.name for entry in found if is_block(entry.name)}

    def look_again(self) -> None:
        """``look``, if the last one is some time ago."""
        if time.monotonic() - self._looked >= _LOOK_SECONDS:
            self.look()

    def read(self, block: BlockName, space: Sequence[memoryview]) -> Found:
        """Reads a block's payload to where it is to be.

        Returns:
            "whole"; "gone", or "damaged", if it was that or another model's, and is removed: then
            anything may lie in ``space``.

        Raises:
            OSError: the disk's; not for a file that is gone.
        """
        path = self.path / block.file
        header = bytearray(block.header_bytes)
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            self.look()  # as others may be
            return "gone"
        try:
            wanted = sum(map(len, space)) + len(header)
            whole = os.fstat(file).st_size == wanted
            whole = whole and _read_all(file, [memoryview(header), *space]) == wanted
        finally:
            os.close(file)
        if whole and block.fits(header, space):
            return "whole"
        self.remove(block)
        return "damaged"

    def prefetch(self, block: BlockName) -> None:
        """Has the system begin to read a block that ``read`` will be asked for."""
        with suppress(OSError):
            file = os.open(self.path / block.file, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(file)

    def write(self, block: BlockName, payload: memoryview, used: int) -> int:
        """Writes a block, whole or not at all.

        Args:
            used: nanoseconds since 1970, see ``BlockFile``.

        Returns:
            Bytes of the file.

        Raises:
            OSError: no space, no permission, a directory that is gone.
        """
        self._written += 1
        new = self.path / f"{NEW}{os.getpid()}-{self._written}"
        header = block.header([payload])
        nbytes = len(header) + len(payload)
        if not self.path.is_dir():  # somebody has removed all blocks
            self._make()
        file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            try:
                _write_all(file, [memoryview(header), payload])
            finally:
                os.close(file)
            os.utime(new, ns=(used, used))
            os.replace(new, self.path / block.file)
        except BaseException:
            with suppress(OSError):
                os.unlink(new)
            raise
        self.names.add(block.file)
        self._total += nbytes
        self._unseen += nbytes
        if self._total > self.limit or self._unseen > self.limit * _UNSEEN:
            self.trim()
        return nbytes

    def touch(self, block: BlockName, used: int) -> None:
        """A block was of use."""
        try:
            os.utime(self.path / block.file, ns=(used, used))
        except FileNotFoundError:
            self.names.discard(block.file)
        except OSError:
            return  # it goes earlier than it should

    def remove(self, block: BlockName) -> None:
        """Takes a block away, if it is there."""
        self.names.discard(block.file)
        with suppress(FileNotFoundError):
            os.unlink(self.path / block.file)

    def trim(self) -> None:
        """Removes the least recently used blocks of all models beyond the limit, and what killed
        processes have left."""
        remove_stale(self.root)
        found = sorted(blocks(self.root), key=lambda file: file.used)
        self._total, self._unseen = sum(file.nbytes for file in found), 0
        if self._total <= self.limit:
            return
        for file in found:
            if self._total <= self.limit * _KEPT:
                return
            with suppress(FileNotFoundError):
                os.unlink(file.path)
            self._total -= file.nbytes
            folder, _, name = file.path.rpartition("/")
            if folder == str(self.path):
                self.names.discard(name)


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
            _write_json(root / MARKER, {"version": VERSION})
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


def _write_json(path: Path, value: object) -> None:
    new = path.with_name(f"{NEW}{os.getpid()}-{path.name}")
    new.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(new, path)


def _read_all(file: int, space: list[memoryview]) -> int:
    """Bytes that were read into the buffers, in order: fewer at the file's end."""
    done = 0
    while space:
        count = os.preadv(file, space[:_IOV], done)
        if not count:
            return done
        done += count
        space = _behind(space, count)
    return done


def _write_all(file: int, data: list[memoryview]) -> None:
    while data:
        data = _behind(data, os.writev(file, data[:_IOV]))


def _behind(parts: list[memoryview], count: int) -> list[memoryview]:
    """What is left of buffers of which so many bytes are done."""
    for i, part in enumerate(parts):
        if count < len(part):
            return [part[count:], *parts[i + 1 :]]
        count -= len(part)
    return []
