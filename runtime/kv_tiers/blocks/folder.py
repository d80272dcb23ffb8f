"""The blocks of one model in a directory, as one process reads and writes them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ...kv_cache.page_store import aligned
from .block import VERSION, BlockName
from .directory import ABOUT, MARKER, NEW, blocks, is_block, remove_stale, write_json
from .reading import IOV, Buffered, Way, behind

_LOOK_SECONDS = 10
_KEPT = 0.95
"""Of the limit, when blocks had to go."""
_UNSEEN = 1 / 32
"""Of the limit: bytes that are written between two looks at what other processes have written."""

Found = Literal["whole", "gone", "damaged"]


@dataclass
class ModelFolder:
    """The blocks of one model, as one process sees them.

    Args:
        root: the directory, which ``prepared`` has seen.
        limit: bytes of all files of the directory.
        fingerprint: 16 bytes, of the model.
        about: of the model, for people.
        way: how blocks are read.
    """

    root: Path
    limit: int
    fingerprint: bytes
    about: dict[str, object]
    way: Way = field(default_factory=Buffered)

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
        write_json(self.path / ABOUT, self.about)
        write_json(self.root / MARKER, {"version": VERSION})

    def look(self) -> None:
        """Finds the blocks that others have written or removed."""
        self._looked = time.monotonic()
        found = os.scandir(self.path) if self.path.is_dir() else ()
        self.names = {entry.name for entry in found if is_block(entry.name)}

    def look_again(self) -> None:
        """``look``, if the last one is some time ago."""
        if time.monotonic() - self._looked >= _LOOK_SECONDS:
            self.look()

    def ask(self, names: Iterable[str]) -> None:
        """Finds which of these blocks others have written by now."""
        self.names.update(name for name in names if (self.path / name).exists())

    def read(self, block: BlockName, space: Sequence[memoryview]) -> Found:
        """Reads a block's payload to where it is to be.

        Returns:
            "whole"; "gone", or "damaged", if it was that or another model's, and is removed: then
            anything may lie in ``space``.

        Raises:
            OSError: the disk's; not for a file that is gone.
        """
        return self.noted(block, self.fetch(block, space))

    def fetch(
        self, block: BlockName, space: Sequence[memoryview], header: memoryview | None = None
    ) -> Found:
        """``read`` of any thread: ``noted`` follows, in the one that has the folder.

        Args:
            header: where the file's header goes, if somebody wants it.
        """
        if header is None:
            header = aligned(block.header_bytes).data
        parts = [header, *space]
        try:
            whole = self.way.read(self.path / block.file, parts) == sum(map(len, parts))
        except FileNotFoundError:
            return "gone"
        return "whole" if whole and block.fits(header, space) else "damaged"

    def noted(self, block: BlockName, found: Found) -> Found:
        """What ``fetch`` has found, after the folder has been changed accordingly."""
        if found == "gone":
            self.look()  # as others may be
        elif found == "damaged":
            self.remove(block)
        return found

    def prefetch(self, block: BlockName) -> None:
        """Has the system begin to read a block that ``read`` will be asked for."""
        self.way.prefetch(self.path / block.file)

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


def _write_all(file: int, data: list[memoryview]) -> None:
    while data:
        data = behind(data, os.writev(file, data[:IOV]))
