"""AMX GEMM of packed 32-row blocks by many tokens (SOSP'25 section 3.2, Figure 6).

The loops, from the outside: slabs of 16 KiB of B tiles; the task's blocks of 32 outputs; groups of
16 tokens; scale groups; tile products. A slab of all tokens stays in L2 for all blocks; a slab of a
block stays in L1 for all tokens. The next slab of weights is prefetched meanwhile, a few lines with
each product.

bf16 blocks are B tiles already, and so are 8-bit integers where activations are int8. Others are
decoded into a slab of them. ``amx_wide`` or ``amx_narrow`` multiplies a slab and adds it to the
sums.

K-quants with int8 activations: a group's factor is a small integer times one float of its 256
inputs. The integers are multiplied into the codes when these are decoded. That makes integers of 13
bits, two planes of int8: twice the products, but of whole tiles, where groups of 16 or 32 inputs
fill a quarter or half of one, and a fold in 256 inputs for each plane.
"""

from __future__ import annotations

from typing import Any

from numba import carray, types

from ..quant.layout import K_BLOCK
from .activations import annotation
from .amx_narrow import make_narrow
from .amx_passes import PARTS_BYTES
from .amx_wide import make_wide
from .decode import AHEAD, LOADS, make_ask, make_reader
from .gemm import ARGUMENTS, MAX_TOKENS, OUT_AT, OUT_BYTES, SLAB_BYTES, TILE, padded_tokens
from .instructions import Instructions
from .intrin.avx512 import store_f32, zero_f32
from .intrin.avx512_bytes import (
    broadcast_u8,
    even_bytes_fma,
    lower_bytes,
    odd_bytes_fma,
    offset_words,
    store_u8,
    upper_bytes,
)
from .intrin.prefetch import prefetch_l2
from .intrin.sync import as_pointer
from .jit import inlined, routine
from .scales import Scales
from .slabs import make_decode, make_gather

_ACT_GROUPS, _SUM_GROUPS = 4, 16  # of a slab, at most

_CONFIG_AT = OUT_AT + OUT_BYTES
_PARTS_AT = _CONFIG_AT + 64
_B_AT = _PARTS_AT + PARTS_BYTES
_ACT_SCALES_AT = _B_AT + SLAB_BYTES  # float32 [_ACT_GROUPS, MAX_TOKENS]
_SUMS_AT = _ACT_SCALES_AT + 4 * _ACT_GROUPS * MAX_TOKENS  # float32 [_SUM_GROUPS, MAX_TOKENS]
SCRATCH_BYTES = _SUMS_AT + 4 * _SUM_GROUPS * MAX_TOKENS
"""Scratch of one worker, 64-byte aligned."""


@inlined
def write_config(config, b_rows):
    """The tile configuration: palette 1 (SDM, LDTILECFG).

    C tiles 0 - 3 and B tiles 6 and 7 have rows of 64 bytes, B only ``b_rows`` of them; A tiles 4
    and 5 have 16 rows of as many dwords.
    """
    store_u8(config, broadcast_u8(0))
    _poke_u8(config, 1)
    for tile in range(8):
        is_a, is_b = 4 <= tile < 6, tile >= 6
        _poke_u8(config + 16 + 2 * tile, 4 * b_rows if is_a else 64)
        _poke_u8(config + 48 + tile, b_rows if is_b else 16)
    return config


@inlined
def _poke_u8(address, value):
    carray(as_pointer(address), (1,), types.uint8)[0] = value


def make_gemm(fmt: str, ops: Instructions, activations: str, amx: Any) -> Any:
    """Compiles the GEMM (``gemm``) of packed blocks in ``fmt``.

    Args:
        fmt: weight format.
        activations: "bf16" or "int8".
        amx: ``intrin.amx``, or ``intrin.amx_model`` where there is none.
    """
    reader = make_reader(fmt, ops)
    packing, scales, INT8 = reader.packing, reader.scales, activations == "int8"
    codes: Any = reader.codes
    ask, ASKED = make_ask(packing), packing.asked
    BIAS = reader.bias
    how = annotation(fmt, activations)
    ACT_K = how.act_k if how and INT8 else 0
    PARTS, TILE_BYTES, PACKED_K = packing.parts, packing.tile_bytes, packing.k_step
    STEP_K = 64 if INT8 else 32  # inputs of a full tile
    DIRECT = TILE_BYTES == TILE and STEP_K == PACKED_K and (INT8 or scales.k == 0)
    STEP_BYTES = 2 * TILE_BYTES * STEP_K // PACKED_K  # packed bytes of 32 outputs by a step
    STEPS = K_BLOCK // STEP_K
    PLANES = 2 if INT8 and scales.small else 1
    SLAB = SLAB_BYTES // (2 * TILE * STEPS * PLANES)  # input blocks of 128
    MINIMA, SUM_K, SUPER_K = scales.minimum is not None, scales.k, scales.super_k
    small_of: Any = scales.small
    if PLANES > 1:
        scales = Scales(scales.super_k, scales.super_factor, scales.minimum)
    if PLANES == 1 and 0 < scales.k <= STEP_K:
        passes = make_narrow(scales, ACT_K, STEP_K, amx)
    else:
        minimum_k = SUM_K if PLANES > 1 else 0
        passes = make_wide(scales, ACT_K, SLAB * K_BLOCK, STEP_K, amx, minimum_k)
    run, flush, GROUPS, B_ROWS = passes.run, passes.flush, passes.token_groups, passes.b_rows
    decode = make_decode(reader, INT8, signed=True, asks=True)
    gather = make_gather(ACT_K, SUM_K if MINIMA else 0)
    variant = f"{fmt}-{activations}-{ops.name}-{amx.__name__.split('.')[-1]}"

    @inlined
    def decode_planes(w, inputs, ahead, b_slab, scale, first_k):
        """Codes times the integer of their group's scale, v -> B tiles [superblock][plane][step]
        [half]: v rounded to multiples of 64, over 64, then what is left of it."""
        PLANE = SUPER_K // STEP_K * 2 * TILE
        for k in range(0, inputs, PACKED_K):
            tile = b_slab + (k // SUPER_K * PLANE) + k // STEP_K * 2 * TILE
            for half in range(2):
                for load in range(LOADS):
                    if load % ASKED == 0:
                        ask(w + AHEAD, load)
                    for part in range(PARTS):
                        lot = load * PARTS + part
                        if 4 * lot % SUM_K == 0:
                            small = small_of(scale, (first_k + k + 4 * lot) // SUM_K, half)
                            offset = offset_words(small, BIAS)
                        q = codes(w, load, part)
                        even = even_bytes_fma(q, small, offset)
                        odd = odd_bytes_fma(q, small, offset)
                        to = tile + half * TILE + 64 * lot
                        store_u8(to, upper_bytes(even, odd))
                        store_u8(to + PLANE, lower_bytes(even, odd))
                w += TILE_BYTES
            for line in range(0, STEP_BYTES * PACKED_K // STEP_K, 64):
                prefetch_l2(ahead + line)
            ahead += STEP_BYTES * PACKED_K // STEP_K

    @routine(ARGUMENTS, variant)
    def gemm(M, blocks, w, block_bytes, scale, scale_bytes, k_blocks, a, rows, tables, scratch):
        Mp, K = padded_tokens(M), k_blocks * K_BLOCK
        out, parts, b_slab = scratch + OUT_AT, scratch + _PARTS_AT, scratch + _B_AT
        act_scales, sums = scratch + _ACT_SCALES_AT, scratch + _SUMS_AT
        a_group = k_blocks * STEPS * TILE
        groups = (M + 15) // 16
        amx.load_config(write_config(scratch + _CONFIG_AT, B_ROWS))
        store_u8(parts, broadcast_u8(0))  # nothing waits to be folded
        for i in range(0, blocks * Mp * 128, 64):
            store_f32(out + i, zero_f32())
        for slab in range(0, k_blocks, SLAB):
            slab_blocks = min(SLAB, k_blocks - slab)
            inputs, steps = slab_blocks * K_BLOCK, slab_blocks * STEPS
            w_slab = w + slab * STEPS * STEP_BYTES
            gather(16 * groups, rows, K, slab * K_BLOCK, inputs, act_scales, sums)
            for block in range(blocks):
                b = w_slab + block * block_bytes
                ahead = b + block_bytes if block + 1 < blocks else w_slab + steps * STEP_BYTES
                lines = 0  # of the next slab of weights, with each product
                if DIRECT:
                    products = (groups + GROUPS - 1) // GROUPS * steps
                    lines = (steps * STEP_BYTES // 64 + products - 1) // products
                elif PLANES > 1:
                    at = scale + block * scale_bytes
                    decode_planes(b, inputs, ahead, b_slab, at, slab * K_BLOCK)
                    b = b_slab
                else:
                    decode(b, inputs, tables, ahead, b_slab)
                    b = b_slab
                for group in range(0, groups, GROUPS):
                    ahead = run(
                        inputs, min(GROUPS, groups - group),
                        a + group * a_group + slab * STEPS * TILE, a_group, b,
                        out + (block * Mp + 16 * group) * 128, scale + block * scale_bytes,
                        slab * K_BLOCK, act_scales + 64 * group, sums + 64 * group,
                        parts, ahead, lines,
                    )  # fmt: skip
            flush(parts)
        amx.release()
        return 0

    return gemm
