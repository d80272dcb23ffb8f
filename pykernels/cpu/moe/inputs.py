"""Copies a call's x into rows (``activations.row_layout``), when it is opened or by tasks.

A long prompt's rows take milliseconds, in which every other thread would wait: there they are tasks
of ``row_chunk`` tokens. A few tokens are copied sooner than a second thread could join in, so
whoever opens the call does those. The bytes are the same.
"""

from __future__ import annotations

import functools
from typing import Any

from numba import carray, types

from ...quant.layout import K_BLOCK
from ..intrin.scalar import round_bf16
from ..intrin.sync import as_pointer, call_routine
from ..jit import inlined, task
from ..job import job_at
from ..raised import RAISED


@inlined
def _copy_row(job, t):
    """Copies token t's inputs into its row and quantizes them.

    The padding is zeroed every time: a wider layer may have used the same rows.
    """
    Hp = job.gate_up_k * K_BLOCK
    row, at = job.x + t * job.x_stride, job.source + t * job.source_stride
    to = carray(as_pointer(row), (Hp,), types.uint16)
    for i in range(job.H, Hp):
        to[i] = 0
    if job.source_bf16 != 0:
        halves = carray(as_pointer(at), (job.H,), types.uint16)
        for i in range(job.H):
            to[i] = halves[i]
    else:
        values = carray(as_pointer(at), (job.H,), types.float32)
        for i in range(job.H):
            to[i] = round_bf16(values[i])
    if job.quantize_x != 0 and call_routine(job.quantize_x, (row, Hp, 0, Hp)) != 0:
        job.raised = RAISED


@inlined
def take_inputs(job_address):
    """Copies x, if there is one and no task will; x may be rows already (``MoECall.bind``)."""
    job = job_at(job_address)
    if job.source != 0 and job.row_chunk == 0:
        for t in range(job.T):
            _copy_row(job, t)


@functools.cache
def make_rows() -> Any:
    """Compiles the task (``jit.TASK``) that copies and quantizes ``row_chunk`` tokens."""

    @task("rows")
    def rows(job_address, index, worker):
        job = job_at(job_address)
        first = index * job.row_chunk
        for t in range(first, min(first + job.row_chunk, job.T)):
            _copy_row(job, t)
        return job.raised

    return rows
