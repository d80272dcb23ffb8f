"""The roofs: how fast this pool's threads read memory and multiply registers, measured now.

The read roof is taken with the same threads, ring and huge pages as the experts, over a buffer
several times the last-level cache, as the fastest of several plain loops (software prefetch to L1,
to L2, none; one stream a thread or two).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import torch

from pykernels.cpu.roofline import (
    FLOPS,
    LOOPS,
    NEEDS,
    STREAM,
    instruction_of,
    make_compute,
    make_read,
)
from pykernels.errors import PykernelsError
from pykernels.target import Target, detect

from ..machine.kept import kept
from ..machine.memory import allocate
from ..machine.topology import Topology
from ..machine.tuning import slug
from ..workers.job import Job, Jobs, in_parallel
from ..workers.pool import WorkerPool

_CHUNK = 4 << 20  # of one task: shorter ones lost up to 9 % to finding their stream


@lru_cache(maxsize=1)
def _buffers(nbytes: int, nodes: tuple[int | None, ...]) -> list[torch.Tensor]:
    """One of ``nbytes`` on each node."""
    need, free = nbytes * len(nodes), Topology.detect().memory_available
    if need > 0.9 * free:
        raise PykernelsError(
            f"the read roof takes {need / 2**30:.1f} GiB, so as not to be read from cache,"
            f" {free / 2**30:.1f} GiB are free",
            "Free some memory",
        )
    buffers = [allocate(nbytes, node) for node in nodes]
    for buffer in buffers:
        buffer.fill_(1)  # pages that were never written are all one zero page
    return buffers


def roof_bytes() -> int:
    """Size of the buffer that is read: 8 times the last-level cache, 512 MiB at least."""
    return max(512 << 20, 8 * detect().l3) // _CHUNK * _CHUNK


def _alike(pool: WorkerPool, task: int, records: Sequence[int], counts: Sequence[int]) -> Jobs:
    """A number of tasks of one kind on each node of a pool."""
    nodes = range(len(pool.nodes)) if pool.is_split else [None]
    return in_parallel(
        [
            Job("roof", task, record, tasks=count, node=node)
            for record, count, node in zip(records, counts, nodes, strict=True)
        ]
    )


def _run(pool: WorkerPool, jobs: Jobs, memory: object) -> float:
    """The seconds of one run."""
    in_flight = pool.wait(pool.start(jobs, memory))
    if in_flight.error is not None:
        raise in_flight.error
    return in_flight.seconds


class ReadRoof:
    """Repeatable passes over one buffer, so that a benchmark can alternate roof and kernel.

    Attributes:
        rates: GB/s of every pass, by loop.

    Args:
        nbytes: of the buffer, on all nodes together; None for ``roof_bytes``.

    Raises:
        PykernelsError: too little memory for it.
    """

    def __init__(self, pool: WorkerPool, nbytes: int | None = None) -> None:
        self.pool = pool
        self.nbytes = nbytes or roof_bytes()
        parts = len(pool.nodes)
        chunks = self.nbytes // _CHUNK // parts  # each node reads its own share
        self.nbytes = parts * chunks * _CHUNK
        self._data = _buffers(chunks * _CHUNK, pool.memory.numbers)
        self._sums = np.zeros(parts * chunks, np.int64)
        self._jobs = np.zeros(parts, STREAM)
        self._jobs["base"] = [data.data_ptr() for data in self._data]
        self._jobs["bytes"] = _CHUNK
        self._jobs["sink"] = self._sums.ctypes.data + 8 * chunks * np.arange(parts)
        jobs = self._jobs.ctypes.data + STREAM.itemsize * np.arange(parts)
        self._loops = {
            loop: _alike(pool, make_read(loop).address, jobs.tolist(), [chunks] * parts)
            for loop in LOOPS
        }
        self.rates: dict[str, list[float]] = {loop: [] for loop in LOOPS}

    def once(self, loop: str) -> float:
        """GB/s (1e9 bytes) of one pass of one of ``LOOPS``; kept in ``rates``."""
        memory = self._data, self._sums, self._jobs
        rate = self.nbytes / _run(self.pool, self._loops[loop], memory) / 1e9
        self.rates[loop].append(rate)
        return rate

    def each_once(self) -> None:
        """One pass of every loop."""
        for loop in LOOPS:
            self.once(loop)

    @property
    def gbps(self) -> float:
        """The roof: the median pass of the fastest loop."""
        return max(statistics.median(rates) for rates in self.rates.values())

    @property
    def was_read(self) -> bool:
        """Whether every chunk's sum is that of its bytes: the pass did read all of them."""
        word = np.full(_CHUNK // 8, 0x0101010101010101, np.int64)
        return bool((self._sums == word.sum()).all())


def read_roof(pool: WorkerPool) -> float:
    """GB/s that the pool's threads read, measured now (about a second).

    Raises:
        PykernelsError: too little memory for the buffer.
    """
    roof = ReadRoof(pool)
    _buffers.cache_clear()  # so that the memory is freed with the roof
    roof.each_once()  # warms up
    roof.rates = {loop: [] for loop in LOOPS}
    for _ in range(5):
        roof.each_once()
    return roof.gbps


def kept_read_roof(threads: int, pool: Callable[[], WorkerPool], least: float = 0.0) -> float:
    """``read_roof``, measured once a day for each CPU and number of threads: that takes a second, a
    quarter of a small model's start.

    Args:
        pool: makes the pool of so many threads, if it is measured.
        least: GB/s that these threads have read: a lower kept figure, of a busy machine, is not
            used.

    Raises:
        PykernelsError: as ``read_roof``.
    """
    name = f"read-roof-{slug(f'{detect().cpu} {threads} threads')}"
    return float(kept(name, lambda: read_roof(pool()), lambda roof: float(roof) >= least))


class ComputeRoof:
    """Repeatable passes of dot products on registers alone, on every thread of the pool.

    Args:
        instruction: one of ``FLOPS`` that this CPU has.
    """

    def __init__(self, pool: WorkerPool, instruction: str) -> None:
        self.pool = pool
        task = make_compute(instruction).address
        self._sink = np.zeros(32, np.float32)
        address = self._sink.ctypes.data + -self._sink.ctypes.data % 64
        tasks = [16 * node.count for node in pool.nodes]
        self._products = _alike(pool, task, [address] * len(tasks), tasks)
        self._flops = sum(tasks) * FLOPS[instruction]
        self.rates: list[float] = []

    def once(self) -> float:
        """TFLOP/s (1e12) of one pass, some milliseconds; kept in ``rates``."""
        seconds = _run(self.pool, self._products, self._sink)
        self.rates.append(self._flops / seconds / 1e12)
        return self.rates[-1]


class Roofs:
    """Both roofs of a pool, sampled between the calls that are measured against them.

    The compute roofs are those of the product instructions that this CPU has.
    """

    def __init__(self, pool: WorkerPool, target: Target) -> None:
        self._target = target
        self._read = ReadRoof(pool)
        self._compute = {
            name: ComputeRoof(pool, name) for name in FLOPS if not target.lacks(NEEDS[name])
        }
        self.sample()  # warms up
        self._read.rates = {loop: [] for loop in LOOPS}
        for roof in self._compute.values():
            roof.rates = []

    def sample(self) -> None:
        """One pass of each."""
        self._read.each_once()
        for roof in self._compute.values():
            roof.once()

    @property
    def read(self) -> float:
        """GB/s: the median pass of the fastest plain loop."""
        return self._read.gbps

    def compute(self, backend: str, activations: str = "bf16") -> tuple[str, float]:
        """The instruction that a backend multiplies with, and TFLOP/s of it on registers alone.

        ("", 0) if the backend has none, or this CPU lacks it.
        """
        name = instruction_of(backend, activations, self._target)
        if name is None or name not in self._compute:
            return "", 0.0
        return name, statistics.median(self._compute[name].rates)
