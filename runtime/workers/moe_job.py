"""The experts of one layer as one job of the ring (SOSP'25 3.2; OSDI'26 3.5).

Its tasks are those of ``pykernels.cpu.moe.stages`` in one order: the pack tasks, the gate-up tasks
of the first active expert, of the second, ..., then the down tasks. Opening sorts the router's
choices by expert, which says how many there are, and copies the inputs of a few tokens.

A down task owns a run of outputs and adds the experts in order; before each it waits at that
expert's barrier, which counts its finished gate-up tasks. Where there are many experts the run is
split over them (as serial split-K): first the first share of all runs, then the second shares,
which go on with the same sums. So every sum has one order. A task waits only for tasks before it.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np

from pykernels.cpu.intrin.descriptor import descriptor
from pykernels.cpu.intrin.sync import atomic_add, atomic_store, call_task
from pykernels.cpu.jit import inlined, task
from pykernels.cpu.job import i64, job_at
from pykernels.cpu.moe.call import take_call

from .ring import LINE, tell, wait_until_at_least

MOE, moe_at = descriptor(
    "moe",
    (
        "ring",
        "count_at",  # address of the number of tokens
        "job",  # pykernels.cpu.job.JOB
        "ids",  # int64 [T, topk]
        "weights",  # float32 [T, topk]
        "barriers",  # a line each: of pack, of gate-up, of the runs of down
    ),
)


def barrier_bytes(E: int, down_chunks: int) -> int:
    """Room for the barriers of any call."""
    return (2 * E + down_chunks) * LINE


@functools.cache
def make_moe() -> tuple[Any, Any]:
    """Compiles (open, run), tasks of ``MOE``."""

    @task("moe-open")
    def opening(address, index, worker):  # type: ignore[no-untyped-def]
        moe = moe_at(address)
        job = job_at(moe.job)
        T = i64(moe.count_at, 0)
        if T == 0:
            return 0
        job.T = T
        active = take_call(moe.job, moe.ids, moe.weights)
        if active <= 0:
            return active
        down = job.h_chunks * job.down_splits
        for i in range(2 * job.A + (job.h_chunks if job.down_splits > 1 else 0)):
            atomic_store(moe.barriers + i * LINE, 0)
        return job.P + job.A * job.i_chunks + down

    @inlined
    def arrive(ring, barrier, expected):  # type: ignore[no-untyped-def]
        if atomic_add(barrier, 1) + 1 == expected:
            tell(ring, barrier)

    @inlined
    def pack(moe, job, piece, worker):  # type: ignore[no-untyped-def]
        status = call_task(job.run_pack, moe.job, piece, worker)
        active = i64(job.piece_active, piece)
        arrive(moe.ring, moe.barriers + active * LINE, i64(job.pieces, active))
        return status

    @inlined
    def gate_up(moe, job, index, worker):  # type: ignore[no-untyped-def]
        active = index // job.i_chunks
        packed = moe.barriers + active * LINE
        if job.P > 0:
            wait_until_at_least(moe.ring, packed, i64(job.pieces, active))
        status = call_task(job.run_gate_up, moe.job, index, worker)
        arrive(moe.ring, packed + job.A * LINE, job.i_chunks)
        return status

    @inlined
    def down(moe, job, index, worker):  # type: ignore[no-untyped-def]
        A, splits = job.A, job.down_splits
        split, chunk = index // job.h_chunks, index % job.h_chunks
        gated = moe.barriers + A * LINE
        splits_done = gated + (A + chunk) * LINE
        if split > 0:
            wait_until_at_least(moe.ring, splits_done, split)
        status = 0
        for active in range(A * split // splits, A * (split + 1) // splits):
            wait_until_at_least(moe.ring, gated + active * LINE, job.i_chunks)
            status |= call_task(job.run_down, moe.job, chunk * A + active, worker)
        if splits > 1:
            arrive(moe.ring, splits_done, split + 1)
        return status

    @task("moe")
    def run(address, index, worker):  # type: ignore[no-untyped-def]
        moe = moe_at(address)
        job = job_at(moe.job)
        if index < job.P:
            return pack(moe, job, index, worker)
        index -= job.P
        if index < job.A * job.i_chunks:
            return gate_up(moe, job, index, worker)
        return down(moe, job, index - job.A * job.i_chunks, worker)

    return opening, run


def describe(job: np.ndarray, task: int) -> str:
    """What a task of the last call does, in words.

    Args:
        job: its ``JOB``, one element.
    """
    words = job[0]
    if task < words["P"]:
        active, what = _word(words["piece_active"], task), "pack"
    elif (task := task - int(words["P"])) < words["A"] * words["i_chunks"]:
        active, what = task // int(words["i_chunks"]), "gate-up"
    else:
        return "down"  # of several experts
    return f"{what} of expert {_word(words['experts'], active)}"


def _word(address: int, index: int) -> int:
    return ctypes.c_int64.from_address(int(address) + 8 * index).value
