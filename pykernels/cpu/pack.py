"""The tile layout's packing as tasks: the fast twin of ``quant.layout.pack_tiles``.

Loading a checkpoint is copying it in another order, so this runs on every worker: one task is one
32-row block, read row by row and written as one stream.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from numba import carray, types

from ..quant.layout import K_STEP, N_BLOCK, padded
from .intrin.descriptor import descriptor
from .intrin.sync import as_pointer
from .jit import inlined, task

PACK, _pack_at = descriptor("pack", ("source", "N", "K", "out", "out_stride"))
"""Job: ``source`` [N, K] contiguous elements; block i goes to ``out + i * out_stride`` (bytes)."""

_PAIRS = K_STEP // 2  # pair-rows of a tile


@inlined
def _place_wide(r, n):
    """Where a tile holds pair-row r of output n, in pairs (the wide order of ``quant.layout``)."""
    return r * 16 + n


@inlined
def _place_byte(r, n):
    """The same for the byte order."""
    return r // 2 * 32 + n // 4 * 8 + r % 2 * 4 + n % 4


@functools.cache
def make_pack(itemsize: int) -> Any:
    """Compiles the pack task (``jit.TASK``) for elements of 1 or 2 bytes; one task a block."""
    element, pair = (types.uint8, types.uint16) if itemsize == 1 else (types.uint16, types.uint32)
    SHIFT = 8 * itemsize
    place = _place_byte if itemsize == 1 else _place_wide

    @task(f"pack-{itemsize}")
    def pack(job_address, block, worker):
        job = _pack_at(job_address)
        steps = (job.K + 127) // 128 * 4
        source = carray(as_pointer(job.source), (job.N * job.K,), element)
        pairs = carray(as_pointer(job.source), (job.N * job.K // 2,), pair)
        out = carray(as_pointer(job.out + block * job.out_stride), (steps * 512,), pair)
        for n in range(N_BLOCK):
            half, column = n // 16, n % 16
            row = block * N_BLOCK + n
            have = job.K if row < job.N else 0
            start = row * job.K
            whole = have // K_STEP if job.K % 2 == 0 else 0  # steps that can be moved in pairs
            for step in range(whole):
                tile = (2 * step + half) * 256
                first = (start + step * K_STEP) // 2
                for r in range(_PAIRS):
                    out[tile + place(r, column)] = pairs[first + r]
            for step in range(whole, steps):
                tile = (2 * step + half) * 256
                for r in range(_PAIRS):
                    k = step * K_STEP + 2 * r
                    low, high = pair(0), pair(0)
                    if k < have:
                        low = pair(source[start + k])
                    if k + 1 < have:
                        high = pair(source[start + k + 1])
                    out[tile + place(r, column)] = low | (high << pair(SHIFT))
        return 0

    return pack


def pack_job(data: torch.Tensor, blocks: torch.Tensor) -> tuple[np.ndarray, int]:
    """The job record and its number of tasks.

    Args:
        data: [N, K] contiguous, elements of 1 or 2 bytes.
        blocks: uint8 [N / 32, block bytes], rows contiguous; the first dimension may be strided.
    """
    N, K = data.shape
    job = np.zeros(1, PACK)
    job["source"], job["N"], job["K"] = data.data_ptr(), N, K
    job["out"], job["out_stride"] = blocks.data_ptr(), blocks.stride(0)
    return job, padded(N, K)[0] // N_BLOCK
