"""Copies a call's x into rows (``activations.row_layout``), in its setup or by tasks.

A long prompt's rows take milliseconds, in which every other thread would wait: there they are tasks
of ``row_chunk`` tokens. A few tokens are copied sooner than a second thread could join in, so
the setup of the call copies those. The bytes are the same.
"""

from __future__ import annotations

import functools
from typing import Any

from numba import carray, types

from ...quant.layout import K_BLOCK
from ..intrin.scalar import round_bf16
from ..intrin.sync import as_pointer, call_routine
from ..jit import inlined, task
from ..raised import RAISED
from .args import moe_args_at


@inlined
def _copy_row(args, t):
    """Copies token t's inputs into its row and quantizes them.

    The padding is zeroed every time: a wider layer may have used the same rows.
    """
    Hp = args.gate_up_k * K_BLOCK
    row, at = args.x + t * args.x_stride, args.source + t * args.source_stride
    to = carray(as_pointer(row), (Hp,), types.uint16)
    for i in range(args.H, Hp):
        to[i] = 0
    if args.source_bf16 != 0:
        halves = carray(as_pointer(at), (args.H,), types.uint16)
        for i in range(args.H):
            to[i] = halves[i]
    else:
        values = carray(as_pointer(at), (args.H,), types.float32)
        for i in range(args.H):
            to[i] = round_bf16(values[i])
    if args.quantize_x != 0 and call_routine(args.quantize_x, (row, Hp, 0, Hp)) != 0:
        args.raised = RAISED


@inlined
def take_inputs(args_address):
    """Copies x, if there is one and no task will; x may be rows already (``MoECall.bind``)."""
    args = moe_args_at(args_address)
    if args.source != 0 and args.row_chunk == 0:
        for t in range(args.T):
            _copy_row(args, t)


@functools.cache
def make_rows() -> Any:
    """Compiles the task (``jit.TASK``) that copies and quantizes ``row_chunk`` tokens."""

    @task("rows")
    def rows(args_address, index, worker):
        args = moe_args_at(args_address)
        first = index * args.row_chunk
        for t in range(first, min(first + args.row_chunk, args.T)):
            _copy_row(args, t)
        return args.raised

    return rows
