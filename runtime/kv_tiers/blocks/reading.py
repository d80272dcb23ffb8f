"""How blocks are read from a disk: which way is the fastest is measured where they lie."""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from ...kv_cache.page_store import Bytes, aligned
from .directory import NEW

THREADS = 4
"""Files that are read at once: a disk is as fast as it can be with several under way."""
IOV = 1000
"""Buffers of one ``preadv`` or ``writev``: Linux takes 1,024."""
_SECTOR = 4096
"""What memory and sizes of O_DIRECT are multiples of, on any disk."""
_PROBES = 8
"""Files that are read each way."""
_PROBE_BYTES = 2 << 20
"""Of each, at most."""
_BETTER = 1.1
"""By which another way must be faster than reading through the page cache, from which what was
written lately need not be read at all."""
_ROUNDS = 2


class Way(Protocol):
    """One way to read files; several threads do."""

    name: str

    def prefetch(self, path: Path) -> None:
        """Has the system begin to read a file that ``read`` will be asked for."""
        ...

    def read(self, path: Path, space: Sequence[memoryview]) -> int:
        """Reads a file into buffers, in order, if it is as long as they are.

        Returns:
            Its bytes; one more than the buffers hold stands for any more.

        Raises:
            OSError: the disk's, or there is no such file.
        """
        ...


class Buffered:
    """Through the page cache, straight to where the bytes are to be."""

    name = "buffered"

    def prefetch(self, path: Path) -> None:
        with suppress(OSError):
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(file)

    def read(self, path: Path, space: Sequence[memoryview]) -> int:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            wanted = sum(map(len, space))
            if (size := os.fstat(file).st_size) != wanted:
                return min(size, wanted + 1)
            return _filled(file, list(space), wanted)
        finally:
            os.close(file)


class Direct:
    """Past the page cache, straight to where the bytes are to be, if the disk can write there:
    addresses and sizes are multiples of its blocks' then. Else into memory of its own, and copied
    from there."""

    name = "direct"

    def __init__(self) -> None:
        self._own = threading.local()

    def prefetch(self, path: Path) -> None:
        """Nothing is read ahead."""

    def read(self, path: Path, space: Sequence[memoryview]) -> int:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        try:
            wanted = sum(map(len, space))
            if (size := os.fstat(file).st_size) != wanted:
                return min(size, wanted + 1)
            try:
                return _filled(file, list(space), wanted)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
            with self._room(wanted) as room:
                done = _filled(file, [room], wanted)
                if done == wanted:
                    _dealt(room, space)
            return done
        finally:
            os.close(file)

    def _room(self, nbytes: int) -> memoryview:
        """Memory of the thread, of whole sectors."""
        nbytes = -(-nbytes // _SECTOR) * _SECTOR
        if len(memory := getattr(self._own, "memory", b"")) < nbytes:
            self._own.memory = memory = mmap.mmap(-1, nbytes)
        return memoryview(memory)[:nbytes]


def fastest(folder: Path, nbytes: int) -> Way:
    """The way that reads files of so many bytes in a directory the fastest, as measured now.

    It writes some such files, and reads them when nothing of them is in memory. Where that cannot
    be done the page cache is used.
    """
    size = max(_SECTOR, min(nbytes, _PROBE_BYTES))
    buffered: Way = Buffered()
    best, least = buffered, float("inf")
    files = [folder / f"{NEW}{os.getpid()}-probe-{i}" for i in range(_PROBES)]
    data = os.urandom(size)
    spaces = [aligned(size) for _ in files]
    try:
        for path in files:
            path.write_bytes(data)
        with ThreadPoolExecutor(THREADS, "kv probes") as threads:
            for way in (buffered, Direct()):
                with suppress(OSError):  # there is no O_DIRECT in some file systems
                    turns = range(_ROUNDS)
                    seconds = min(_seconds(way, files, spaces, threads) for _ in turns)
                    if seconds * (_BETTER if way is not buffered else 1) < least:
                        best, least = way, seconds
    except OSError:  # a full disk
        return buffered
    finally:
        for path in files:
            with suppress(OSError):
                path.unlink()
    return best


def _seconds(
    way: Way, files: Sequence[Path], spaces: Sequence[Bytes], threads: ThreadPoolExecutor
) -> float:
    for path in files:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)
    began = time.perf_counter()
    reads = [
        threads.submit(way.read, path, [space.data])
        for path, space in zip(files, spaces, strict=True)
    ]
    for read in reads:
        read.result()
    return time.perf_counter() - began


def _filled(file: int, space: list[memoryview], wanted: int) -> int:
    """Bytes that were read into the buffers, in order, until there are so many: fewer at the
    file's end."""
    done = 0
    while done < wanted:
        count = os.preadv(file, space[:IOV], done)
        if not count:
            break
        done += count
        space = behind(space, count)
    return done


def _dealt(data: memoryview, space: Sequence[memoryview]) -> None:
    at = 0
    for part in space:
        part[:] = data[at : at + len(part)]
        at += len(part)


def behind(parts: list[memoryview], count: int) -> list[memoryview]:
    """The parts of buffers that come after their first ``count`` bytes."""
    for i, part in enumerate(parts):
        if count < len(part):
            return [part[count:], *parts[i + 1 :]]
        count -= len(part)
    return []
