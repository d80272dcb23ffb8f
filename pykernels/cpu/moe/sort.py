"""From a router's choices to a job: slots sorted by expert."""

from __future__ import annotations

from numba import carray, types

from ..intrin.sync import as_pointer
from ..jit import inlined
from ..job import job_at
from .stages import PIECE

OK, BAD_EXPERT = 0, 1


@inlined
def _words(address, count):
    return carray(as_pointer(address), (count,), types.int64)


@inlined
def _lay_out_groups(job):
    """Gives each expert its rows of h, and one that takes the GEMM its groups of 16 slots, in
    pairs, and its pieces."""
    starts = _words(job.starts, job.A + 1)
    groups, pieces = _words(job.groups, job.A), _words(job.pieces, job.A)
    h_rows = _words(job.h_rows, job.A)
    few, many = 0, 0  # slots so far
    group, piece = 0, 0
    for active in range(job.A):
        first, last = starts[active], starts[active + 1]
        groups[active], pieces[active] = group, 0
        if last - first < job.gemm_from:
            h_rows[active] = job.h + (few - first) * job.h_stride
            few += last - first
            continue
        h_rows[active] = job.h_gemm + (many - first) * job.h_gemm_stride
        many += last - first
        group += (last - first + 31) // 32 * 2
        for slot in range(first, last, PIECE):
            _words(job.piece_active, piece + 1)[piece] = active
            _words(job.piece_slot, piece + 1)[piece] = slot
            pieces[active] += 1
            piece += 1
    job.P = piece


@inlined
def sort_slots(job_address, ids_address, weights_address):
    """Fills the job's slot arrays by a counting sort of the (token, expert) pairs.

    Slots are ordered by expert, then by token: the order in which results are summed.

    Args:
        ids_address: int64 [T, topk], contiguous; -1: not here, which takes no slot.
        weights_address: float32 [T, topk], contiguous.

    Returns:
        OK, or BAD_EXPERT if an id is outside -1 .. E - 1 (the job is unchanged then).
    """
    job = job_at(job_address)
    E, topk = job.E, job.topk
    S = job.T * topk
    ids = _words(ids_address, S)
    weights = carray(as_pointer(weights_address), (S,), types.float32)
    cursor = _words(job.cursor, E)
    for e in range(E):
        cursor[e] = 0
    for s in range(S):
        if ids[s] < -1 or ids[s] >= E:
            return BAD_EXPERT
        if ids[s] >= 0:
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
        if ids[s] < 0:
            continue
        slot = cursor[ids[s]]
        cursor[ids[s]] = slot + 1
        slot_token[slot] = s // topk
        slot_weight[slot] = weights[s]
    job.S = total
    job.A = active
    _lay_out_groups(job)
    return OK
