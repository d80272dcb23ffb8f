"""From a router's choices to a job: inputs as bf16, slots sorted by expert."""

from __future__ import annotations

from numba import carray, types

from ..quant.layout import K_BLOCK
from .intrin.sync import as_pointer, call_routine
from .jit import inlined, kernel
from .job import job_at
from .stages import PIECE
from .tile_generic import round_bf16

OK, BAD_EXPERT = 0, 1


@inlined
def _words(address, count):
    return carray(as_pointer(address), (count,), types.int64)


@kernel()
def copy_rows(job_address, source, source_stride, source_bf16):
    """Copies x [T, H] (bf16 or float32, strides in bytes) into the job's rows and annotates them.

    The padding is zeroed every time: a wider layer may have used the same rows.
    """
    job = job_at(job_address)
    Hp = job.gate_up_k * K_BLOCK
    for t in range(job.T):
        to = carray(as_pointer(job.x + t * job.x_stride), (Hp,), types.uint16)
        for i in range(job.H, Hp):
            to[i] = 0
        at = source + t * source_stride
        if source_bf16:
            halves = carray(as_pointer(at), (job.H,), types.uint16)
            for i in range(job.H):
                to[i] = halves[i]
        else:
            values = carray(as_pointer(at), (job.H,), types.float32)
            for i in range(job.H):
                to[i] = round_bf16(values[i])
        if job.annotate != 0:
            call_routine(job.annotate, (job.x + t * job.x_stride, Hp, 0, Hp))


@inlined
def _lay_out_groups(job):
    """Gives each expert that takes the GEMM its groups of 16 slots, in pairs, and its pieces."""
    starts = _words(job.starts, job.A + 1)
    groups, pieces = _words(job.groups, job.A), _words(job.pieces, job.A)
    group, piece = 0, 0
    for active in range(job.A):
        first, last = starts[active], starts[active + 1]
        groups[active], pieces[active] = group, 0
        if last - first < job.gemm_from:
            continue
        group += (last - first + 31) // 32 * 2
        for slot in range(first, last, PIECE):
            _words(job.piece_active, piece + 1)[piece] = active
            _words(job.piece_slot, piece + 1)[piece] = slot
            pieces[active] += 1
            piece += 1
    job.P = piece


@kernel()
def sort_slots(job_address, E, topk, ids_address, weights_address, cursor_address):
    """Fills the job's slot arrays by a counting sort of the (token, expert) pairs.

    Slots are ordered by expert, then by token: the order in which results are summed.

    Args:
        ids_address: int64 [T, topk], contiguous.
        weights_address: float32 [T, topk], contiguous.
        cursor_address: int64 [E] scratch.

    Returns:
        OK, or BAD_EXPERT if an id is outside 0 .. E - 1 (the job is unchanged then).
    """
    job = job_at(job_address)
    S = job.T * topk
    ids = _words(ids_address, S)
    weights = carray(as_pointer(weights_address), (S,), types.float32)
    cursor = _words(cursor_address, E)
    for e in range(E):
        cursor[e] = 0
    for s in range(S):
        if ids[s] < 0 or ids[s] >= E:
            return BAD_EXPERT
        cursor[ids[s]] += 1
    experts, starts = _words(job.experts, E), _words(job.starts, E + 1)
    active, total = 0, 0
    for e in range(E):
        count = cursor[e]
        cursor[e] = total
        if count > 0:
            experts[active] = e
            starts[active] = total
            active += 1
            total += count
    starts[active] = total
    slot_token = _words(job.slot_token, S)
    slot_weight = carray(as_pointer(job.slot_weight), (S,), types.float32)
    for s in range(S):
        slot = cursor[ids[s]]
        cursor[ids[s]] = slot + 1
        slot_token[slot] = s // topk
        slot_weight[slot] = weights[s]
    job.S = S
    job.A = active
    _lay_out_groups(job)
    return OK
