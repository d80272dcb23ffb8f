"""The read roof: how fast this pool's threads read memory, measured now.

It is taken with the same threads, queue and huge pages as the experts, over a buffer several times
the last-level cache, as the faster of two plain loops (with and without software prefetch).
"""

from __future__ import annotations

import statistics
from functools import lru_cache

import numpy as np
import torch

from pykernels.cpu.stream import STREAM, make_read
from pykernels.target import detect

from .memory import allocate
from .pool import Call, WorkerPool

_CHUNK = 1 << 20

LOOPS = (4096, 0)
"""The plain loops, by how many bytes they prefetch ahead (0: only the hardware does)."""


@lru_cache(maxsize=1)
def _buffer(nbytes: int) -> torch.Tensor:
    buffer = allocate(nbytes)
    buffer.fill_(1)  # pages that were never written are all one zero page
    return buffer


def roof_bytes() -> int:
    """Size of the buffer that is read: 8 times the last-level cache, 512 MiB at least."""
    return max(512 << 20, 8 * detect().l3) // _CHUNK * _CHUNK


class ReadRoof:
    """Repeatable passes over one buffer, so that a benchmark can time roof and kernel in turn."""

    def __init__(self, pool: WorkerPool, nbytes: int | None = None) -> None:
        self.pool = pool
        self.nbytes = nbytes or roof_bytes()
        self._data = _buffer(self.nbytes)
        chunks = self.nbytes // _CHUNK
        self._sums = np.zeros(chunks, np.int64)
        self._job = np.zeros(1, STREAM)
        self._job["base"], self._job["bytes"] = self._data.data_ptr(), _CHUNK
        self._job["sink"] = self._sums.ctypes.data
        read = make_read().address
        self._call = Call(read, read, self._job.ctypes.data, chunks, 1, 0)

    def once(self, ahead: int = LOOPS[0]) -> float:
        """GB/s (1e9 bytes) of one pass."""
        self._job["ahead"] = ahead
        self.pool.start(self._call)
        seconds = self.pool.wait()
        return self.nbytes / seconds / 1e9

    @property
    def was_read(self) -> bool:
        """Whether every chunk's sum is that of its bytes: the pass read what it says it read."""
        word = np.full(_CHUNK // 8, 0x0101010101010101, np.int64)
        return bool((self._sums == word.sum()).all())

    def measure(self, passes: int = 5) -> float:
        """GB/s: the median of ``passes`` passes, of the faster loop."""
        self.once()
        return max(statistics.median(self.once(ahead) for _ in range(passes)) for ahead in LOOPS)


def read_roof(pool: WorkerPool) -> float:
    """GB/s that the pool's threads read, measured now (about a second)."""
    return ReadRoof(pool).measure()
