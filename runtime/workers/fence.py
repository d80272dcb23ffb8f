"""Between two batches that are in flight together: whether the second one runs, and on what.

A decode step reads little that the one before does not bring it: the tokens that it draws, and
counters. So the next one can be in the ring before that one ends, behind a *fence*: a job whose
setup gives it these inputs when the step before is complete. No line of Python runs in between.

The fence gives its batch up, so that the workers walk past it, where another step than this one is
to come: the step before has failed or drawn a token that ends a request, or somebody has asked for
something meanwhile.
"""

from __future__ import annotations

import functools
from collections.abc import Set
from typing import Any

import numpy as np

from pykernels.cpu.intrin.descriptor import descriptor
from pykernels.cpu.intrin.sync import atomic_load, atomic_store
from pykernels.cpu.jit import task
from pykernels.cpu.words import i64, poke_i64

from .job import Job, Jobs
from .ring import FAILED, SKIPPED

FENCE, _fence_at = descriptor(
    "fence",
    (
        "ring",
        "last",  # number of the batch's last job
        "give_up",  # address of an int64: not 0 where another step is to come
        "passed",  # 1 when the batch runs, 0 when it was given up
        "drawn",  # int64 [S]: of the step before; they stay there while the batch runs
        "kept",  # int64 [S]: its copy
        "ends",  # int64 [ends_count]: tokens that end a request
        "ends_count",
        "next_inputs",  # int64 [columns, stride]: the inputs, but for the first column, the tokens
        "inputs",  # the same: what the jobs read
        "columns",
        "stride",
        "S",
    ),
)


@functools.cache
def make_fence() -> Any:
    """Compiles (or loads) the setup of a fence."""

    @task("fence")
    def fence(address, index, worker):  # type: ignore[no-untyped-def]
        f = _fence_at(address)
        stop = atomic_load(f.ring + FAILED) + atomic_load(f.give_up)
        for s in range(f.S):
            token = i64(f.drawn, s)
            poke_i64(f.kept, s, token)
            for e in range(f.ends_count):
                if i64(f.ends, e) == token:
                    stop = 1
        if stop != 0:
            atomic_store(f.ring + SKIPPED, f.last)
            f.passed = 0
            return 0
        for column in range(f.columns):
            at = column * f.stride
            source = f.next_inputs + 8 * at if column > 0 else f.kept
            for s in range(f.S):
                poke_i64(f.inputs + 8 * at, s, i64(source, s))
        f.passed = 1
        return 0

    return fence


_NO_TOKENS: Set[int] = frozenset()


class FencedJobs:
    """The jobs of a step once more, behind a fence.

    Args:
        jobs: of the step; both sets have the same tasks and memory, and do not run together.
        ring: address of the pool's ring.
        inputs: int64 [columns, N], what the jobs read; row 0 holds the tokens.
        drawn: int64 [>= S], the tokens that the step draws.
        give_up: int64 [1], not 0 where another step is to come.

    Attributes:
        jobs: for ``WorkerPool.start_behind``.
        kept: int64, what the step before has drawn, once the fence is complete.
    """

    def __init__(
        self, jobs: Jobs, ring: int, inputs: np.ndarray, drawn: np.ndarray, give_up: np.ndarray
    ) -> None:
        self._next_inputs, self.kept = np.zeros_like(inputs), np.zeros_like(drawn)
        self._ends, self._of = np.zeros(0, np.int64), _NO_TOKENS
        self._arrays = inputs, drawn, give_up
        self._record = record = np.zeros(1, FENCE)
        record["ring"], record["give_up"] = ring, give_up.ctypes.data
        record["drawn"], record["kept"] = drawn.ctypes.data, self.kept.ctypes.data
        record["next_inputs"], record["inputs"] = self._next_inputs.ctypes.data, inputs.ctypes.data
        record["columns"], record["stride"] = len(inputs), inputs.strides[0] // 8
        address = make_fence().address
        fence = Job("fence", 0, record.ctypes.data, setup=address, after=1)
        again = [job.again() for job in jobs.jobs]
        for place, job in enumerate(again, 1):
            job.after = job.after or (place,)
        self.jobs = Jobs([fence, *again])

    def arrange(self, inputs: np.ndarray, S: int, ends: Set[int], head: int) -> None:
        """Before each publishing.

        Args:
            inputs: int64 [columns, >= S], of the step to come; row 0 is not read.
            S: its sequences.
            ends: tokens that end one of them.
            head: number of the job that was published last.
        """
        self._next_inputs[1:, :S] = inputs[1:, :S]
        record = self._record
        if ends is not self._of:
            self._ends, self._of = np.fromiter(ends, np.int64, len(ends)), ends
            record["ends"], record["ends_count"] = self._ends.ctypes.data, len(ends)
        record["S"], record["last"] = S, head + self.jobs.count

    @property
    def passed(self) -> bool:
        """Whether the batch runs, once the fence is complete."""
        return bool(self._record["passed"][0])
