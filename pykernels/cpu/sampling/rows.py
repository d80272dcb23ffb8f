"""What the parameters of a row ask for."""

from __future__ import annotations

import numpy as np
from numba import carray, types

from ...ref.sampling import COLDEST, HOTTEST
from ..intrin.sync import as_pointer
from ..jit import inlined
from ..words import f32, i64
from .args import CHUNK, PARTIAL_BYTES, number, partial_at
from .passes import LEAST

NAN = np.float32(np.nan)
_COLDEST, _HOTTEST = np.float32(COLDEST), np.float32(HOTTEST)
_ZERO = np.float32(0.0)


@inlined
def heat_of(args, r):
    """A row's temperature; 0 where the largest is taken (NaN is no temperature either)."""
    heat = f32(args.temperature, r)
    return min(heat, _HOTTEST) if heat >= _COLDEST else _ZERO


@inlined
def is_adjusted(args, r):
    """Whether a row's logits do not stay as they came."""
    return i64(args.mask_row, r) >= 0 or i64(args.bias_count, r) > 0 or i64(args.seen_row, r) >= 0


@inlined
def row_of(args, r):
    """Address of the logits that a row draws from."""
    if is_adjusted(args, r):
        return args.adjusted + 4 * r * args.V
    return args.logits + r * args.logits_stride


@inlined
def keeps_all(args, r):
    """Whether neither top-k nor min-p leaves out any of a row."""
    k = i64(args.top_k, r)
    return (k < 1 or k >= args.V) and not f32(args.min_p, r) > _ZERO


@inlined
def mask_of(args, r):
    """Address of a row's mask; 0: it has none."""
    mine = i64(args.mask_row, r)
    return args.mask + 4 * mine * ((args.V + 31) // 32) if mine >= 0 else types.int64(0)


@inlined
def seen_of(args, r):
    """Address of int32 [V], what a row's penalties go by; 0: it has none."""
    mine = i64(args.seen_row, r)
    return args.seen + 4 * mine * args.V if mine >= 0 else types.int64(0)


@inlined
def is_allowed(mask, v):
    """Whether bit v of a mask is set; without a mask (0) all are."""
    if mask == 0:
        return True
    byte = carray(as_pointer(mask), (v // 8 + 1,), types.uint8)[v // 8]
    return (types.int64(byte) >> (v % 8)) & 1 != 0


@inlined
def partial_of(args, r, chunk):
    """What the tasks have found in a chunk of a row."""
    chunks = (args.V + CHUNK - 1) // CHUNK
    return partial_at(args.partials + PARTIAL_BYTES * (r * chunks + chunk))


@inlined
def largest(args, r):
    """(largest adjusted logit of a row, its lowest id, id of the first that is NaN); -inf and -1 if
    none is above -inf, -1 if none is NaN."""
    best, best_id = LEAST, -1
    for c in range((args.V + CHUNK - 1) // CHUNK):
        partial = partial_of(args, r, c)
        if partial.first_nan >= 0:
            return LEAST, -1, partial.first_nan
        if number(partial.best) > best:
            best, best_id = number(partial.best), partial.best_id
    return best, best_id, -1
