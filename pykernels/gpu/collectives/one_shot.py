"""All-reduce of a few rows in one launch a GPU: each writes its part to all others, and adds up.

The sizes of decode steps are bound by latency, so every GPU gets every part whole ("one-shot", as
in TensorRT-LLM and vLLM). A program of the launch handles ``BLOCK`` numbers: it stores them to the
others' memory, releases a flag there, spins until theirs have come, and adds all parts in the order
of ranks, so that every GPU has the same bits. It meets the same program of the other GPUs only:
there is no barrier of a launch.

Flags count, and the count of each program lies in device memory, so a captured graph may be
replayed. Memory of a part is used in turns of two: a GPU that is ahead has seen that the other one
has begun the sum before, which it does when it has read the one before that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ...errors import PykernelsError
from ..common.bf16 import to_bf16
from ..common.launch import FLOATS, check_device
from ..limits import SUM_BLOCK as BLOCK
from ..limits import SUM_MEMBERS as MAX_MEMBERS
from ..limits import SUM_PROGRAMS as MAX_PROGRAMS

SPINS = 1 << 27
"""Looks at a flag before a GPU gives up: over a minute, as another one may compile kernels."""
_EVERY = tl.constexpr(512)  # of these looks one goes to main memory, at `stop`


@triton.jit
def _post(y, flags, at, place, value, mask, count):
    tl.store(y + at, value, mask=mask)
    tl.debug_barrier()  # what all threads have stored is before the flag of one
    tl.atomic_xchg(flags + place, count, sem="release", scope="sys")


@triton.jit
def _await(flag, count, stop, spins):
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    looks = 0
    while (seen - count < 0) & (looks < spins):  # by their difference: counts wrap around
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        looks += 1
        if looks % _EVERY == 0:
            if tl.load(stop, volatile=True) != 0:
                looks = spins
    if seen - count < 0:
        tl.store(stop, 1)
    tl.debug_barrier()


@triton.jit
def _one_shot(
    x,
    out,
    y0,
    y1,
    y2,
    y3,
    flags0,
    flags1,
    flags2,
    flags3,
    mine,
    my_flags,
    counts,
    stop,
    N,
    spins,
    RANK: tl.constexpr,
    COUNT: tl.constexpr,
    MEMBERS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    SEND: tl.constexpr,
    ADD: tl.constexpr,
):
    p = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    n = p * BLOCK + i
    mask = n < N
    done = tl.load(counts + p)
    slot = (done & 1) * MEMBERS
    value = tl.load(x + n, mask=mask, other=0.0)
    if SEND:
        at, place = ((slot + RANK) * PROGRAMS + p) * BLOCK + i, RANK * PROGRAMS + p
        if RANK != 0:
            _post(y0, flags0, at, place, value, mask, done + 1)
        if RANK != 1:
            _post(y1, flags1, at, place, value, mask, done + 1)
        if COUNT > 2 and RANK != 2:
            _post(y2, flags2, at, place, value, mask, done + 1)
        if COUNT > 3 and RANK != 3:
            _post(y3, flags3, at, place, value, mask, done + 1)
    if ADD:
        total = tl.zeros((BLOCK,), tl.float32)
        for m in tl.static_range(COUNT):
            at = ((slot + m) * PROGRAMS + p) * BLOCK + i
            if m == RANK:
                part = value
            else:
                _await(my_flags + m * PROGRAMS + p, done + 1, stop, spins)
                part = tl.load(mine + at, mask=mask, other=0.0, volatile=True)
            if m == 0:
                total = part.to(tl.float32)
            else:
                total += part.to(tl.float32)
        if out.dtype.element_ty == tl.bfloat16:
            tl.store(out + n, to_bf16(total), mask=mask)
        else:
            tl.store(out + n, total.to(out.dtype.element_ty), mask=mask)
        tl.store(counts + p, done + 1)


@dataclass(frozen=True)
class OneShotMemory:
    """What a GPU's peers write to, and its own count.

    Attributes:
        parts: uint8, two turns of a part of each member.
        flags: int32 [MAX_MEMBERS, MAX_PROGRAMS], how many parts each member has written.
        counts: int32 [MAX_PROGRAMS], how many sums this GPU has made.
    """

    parts: torch.Tensor
    flags: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def on(cls, device: torch.device) -> OneShotMemory:
        """Allocates the memory of a GPU, all counts zero."""
        nbytes = 2 * MAX_MEMBERS * MAX_PROGRAMS * BLOCK * torch.float32.itemsize
        return cls(
            torch.zeros(nbytes, dtype=torch.uint8, device=device),
            torch.zeros(MAX_MEMBERS, MAX_PROGRAMS, dtype=torch.int32, device=device),
            torch.zeros(MAX_PROGRAMS, dtype=torch.int32, device=device),
        )

    def reset(self) -> None:
        """To the beginning, when no GPU computes: one may have made a sum that others have not."""
        self.flags.zero_()
        self.counts.zero_()


def fits(numbers: int, members: int) -> bool:
    """Whether so many numbers of each of so many GPUs are summed in one launch."""
    return 1 < members <= MAX_MEMBERS and 0 < numbers <= MAX_PROGRAMS * BLOCK


def one_shot_all_reduce(
    x: torch.Tensor,
    members: Sequence[OneShotMemory],
    rank: int,
    stop: torch.Tensor,
    out: torch.Tensor,
    send: bool = True,
    add: bool = True,
) -> None:
    """out = the sum of all members' x in the order of ranks, in float32, rounded once.

    All members launch it with x of one shape and dtype, each in its own stream, in one order.

    Args:
        x: [T, H] floats, contiguous, of ``fits`` numbers.
        members: by rank, of the GPUs, which reach each other's memory and have native atomics
            between them; ``rank``: of this one.
        stop: int32 [1], pinned, the same on all: not 0 ends all spinning. A GPU that has waited in
            vain sets it, and sums are wrong from there on.
        out: like x, of any floats.
        send, add: False leaves out a half, where launches cannot wait for each other.

    Raises:
        PykernelsError: other shapes or dtypes, too many numbers, or no Triton here.
    """
    check_device(x, out)
    if x.dtype not in FLOATS or out.dtype not in FLOATS or x.shape != out.shape:
        raise PykernelsError(
            f"{x.dtype} {tuple(x.shape)} to {out.dtype} {tuple(out.shape)}",
            "Give floats of one shape",
        )
    if not x.is_contiguous() or not out.is_contiguous() or not fits(x.numel(), len(members)):
        raise PykernelsError(
            f"{tuple(x.shape)} of {len(members)} GPUs",
            f"Give contiguous ones, up to {MAX_PROGRAMS * BLOCK} numbers of {MAX_MEMBERS} GPUs",
        )
    empty = [None] * (MAX_MEMBERS - len(members))
    own = members[rank]
    _one_shot[(triton.cdiv(x.numel(), BLOCK),)](
        x,
        out,
        *(member.parts.view(x.dtype) for member in members),
        *empty,
        *(member.flags for member in members),
        *empty,
        own.parts.view(x.dtype),
        own.flags,
        own.counts,
        stop,
        x.numel(),
        SPINS,
        RANK=rank,
        COUNT=len(members),
        MEMBERS=MAX_MEMBERS,
        PROGRAMS=MAX_PROGRAMS,
        BLOCK=BLOCK,
        SEND=send,
        ADD=add,
        num_warps=8,
    )
