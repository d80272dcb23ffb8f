"""The experts of one layer as one job of the ring (SOSP'25 3.2; OSDI'26 3.5).

Its tasks are those of ``pykernels.cpu.moe.stages`` in one order: the pack tasks, the gate-up tasks
of the first active expert, of the second, ..., then the down tasks. Its setup sorts the
router's choices by expert, counts the tasks, and copies the inputs of a few tokens.

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
from pykernels.cpu.moe.args import moe_args_at
from pykernels.cpu.moe.call import take_call
from pykernels.cpu.words import i64

from .ring import LINE, wait_as, wake

MOE, moe_at = descriptor(
    "moe",
    (
        "ring",
        "count_at",  # address of the number of tokens
        "args",  # pykernels.cpu.moe.args.MOE_ARGS
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
    """Compiles (setup, run), tasks of ``MOE``."""

    @task("moe-setup")
    def setup(address, index, worker):  # type: ignore[no-untyped-def]
        moe = moe_at(address)
        args = moe_args_at(moe.args)
        T = i64(moe.count_at, 0)
        if T == 0:
            return 0
        args.T = T
        active = take_call(moe.args, moe.ids, moe.weights)
        if active <= 0:
            return active
        down = args.h_chunks * args.down_splits
        for i in range(2 * args.A + (args.h_chunks if args.down_splits > 1 else 0)):
            atomic_store(moe.barriers + i * LINE, 0)
        return args.P + args.A * args.i_chunks + down

    @inlined
    def arrive(ring, barrier, expected):  # type: ignore[no-untyped-def]
        if atomic_add(barrier, 1) + 1 == expected:
            wake(ring, barrier)

    @inlined
    def pack(moe, args, piece, worker):  # type: ignore[no-untyped-def]
        status = call_task(args.run_pack, moe.args, piece, worker)
        active = i64(args.piece_active, piece)
        arrive(moe.ring, moe.barriers + active * LINE, i64(args.pieces, active))
        return status

    @inlined
    def gate_up(moe, args, index, worker):  # type: ignore[no-untyped-def]
        active = index // args.i_chunks
        packed = moe.barriers + active * LINE
        if args.P > 0:
            wait_as(moe.ring, worker, 0, 0, packed, i64(args.pieces, active))
        status = call_task(args.run_gate_up, moe.args, index, worker)
        arrive(moe.ring, packed + args.A * LINE, args.i_chunks)
        return status

    @inlined
    def down(moe, args, index, worker):  # type: ignore[no-untyped-def]
        A, splits = args.A, args.down_splits
        split, chunk = index // args.h_chunks, index % args.h_chunks
        gated = moe.barriers + A * LINE
        splits_done = gated + (A + chunk) * LINE
        if split > 0:
            wait_as(moe.ring, worker, 0, 0, splits_done, split)
        status = 0
        for active in range(A * split // splits, A * (split + 1) // splits):
            wait_as(moe.ring, worker, 0, 0, gated + active * LINE, args.i_chunks)
            status |= call_task(args.run_down, moe.args, chunk * A + active, worker)
        if splits > 1:
            arrive(moe.ring, splits_done, split + 1)
        return status

    @task("moe")
    def run(address, index, worker):  # type: ignore[no-untyped-def]
        moe = moe_at(address)
        args = moe_args_at(moe.args)
        if index < args.P:
            return pack(moe, args, index, worker)
        index -= args.P
        if index < args.A * args.i_chunks:
            return gate_up(moe, args, index, worker)
        return down(moe, args, index - args.A * args.i_chunks, worker)

    return setup, run


def describe(args: np.ndarray, task: int) -> str:
    """What a task of the last call does, in words.

    Args:
        args: its ``MOE_ARGS``, one element.
    """
    words = args[0]
    if task < words["P"]:
        active, what = _word(words["piece_active"], task), "pack"
    elif (task := task - int(words["P"])) < words["A"] * words["i_chunks"]:
        active, what = task // int(words["i_chunks"]), "gate-up"
    else:
        return "down"  # of several experts
    return f"{what} of expert {_word(words['experts'], active)}"


def _word(address: int, index: int) -> int:
    return ctypes.c_int64.from_address(int(address) + 8 * index).value
