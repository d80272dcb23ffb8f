"""Sorts the (token, expert) pairs of a router's choices by expert."""

from __future__ import annotations

from numba import carray, types

from ..intrin.sync import as_pointer
from ..jit import inlined
from .args import moe_args_at
from .stages import PIECE

OK, BAD_EXPERT = 0, 1


@inlined
def _words(address, count):
    return carray(as_pointer(address), (count,), types.int64)


@inlined
def _lay_out_groups(args):
    """Gives each expert its rows of h, and one that takes the GEMM its groups of 16 pairs, in
    pairs, and its pieces."""
    starts = _words(args.starts, args.A + 1)
    groups, pieces = _words(args.groups, args.A), _words(args.pieces, args.A)
    h_rows = _words(args.h_rows, args.A)
    few, many = 0, 0  # pairs so far
    group, piece = 0, 0
    for active in range(args.A):
        first, last = starts[active], starts[active + 1]
        groups[active], pieces[active] = group, 0
        if last - first < args.gemm_from:
            h_rows[active] = args.h + (few - first) * args.h_stride
            few += last - first
            continue
        h_rows[active] = args.h_gemm + (many - first) * args.h_gemm_stride
        many += last - first
        group += (last - first + 31) // 32 * 2
        for pair in range(first, last, PIECE):
            _words(args.piece_active, piece + 1)[piece] = active
            _words(args.piece_pair, piece + 1)[piece] = pair
            pieces[active] += 1
            piece += 1
    args.P = piece


@inlined
def sort_pairs(args_address, ids_address, weights_address):
    """Fills the call's arrays of (token, expert) pairs by a counting sort.

    Pairs are ordered by expert, then by token: the order in which results are summed.

    Args:
        ids_address: int64 [T, topk], contiguous; -1: not here, which takes no pair.
        weights_address: float32 [T, topk], contiguous.

    Returns:
        OK, or BAD_EXPERT if an id is outside -1 .. E - 1 (the args are unchanged then).
    """
    args = moe_args_at(args_address)
    E, topk = args.E, args.topk
    S = args.T * topk
    ids = _words(ids_address, S)
    weights = carray(as_pointer(weights_address), (S,), types.float32)
    cursor = _words(args.cursor, E)
    for e in range(E):
        cursor[e] = 0
    for s in range(S):
        if ids[s] < -1 or ids[s] >= E:
            return BAD_EXPERT
        if ids[s] >= 0:
            cursor[ids[s]] += 1
    experts, starts = _words(args.experts, E), _words(args.starts, E + 1)
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
    pair_token = _words(args.pair_token, S)
    pair_weight = carray(as_pointer(args.pair_weight), (S,), types.float32)
    for s in range(S):
        if ids[s] < 0:
            continue
        pair = cursor[ids[s]]
        cursor[ids[s]] = pair + 1
        pair_token[pair] = s // topk
        pair_weight[pair] = weights[s]
    args.S = total
    args.A = active
    _lay_out_groups(args)
    return OK
