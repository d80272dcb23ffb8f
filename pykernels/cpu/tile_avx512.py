"""AVX-512 tiles: a packed 32-row block times M tokens (SOSP'25 section 3.2; OSDI'26 section 3.4).

The three loops of OSDI'26 Figure 10: over scale groups of the inputs, over dot products inside a
group with no multiply by the scale, one multiply-add into the running sum at its end. What a dot
product is, bfloat16 or int8, is ``products``' business.

Each output is summed in the same order whatever M is, or in integers, so a token's result does not
depend on its batch.
"""

from __future__ import annotations

from typing import Any

from ..quant.layout import K_BLOCK
from .decode import make_reader
from .instructions import Instructions
from .intrin.avx512 import add_f32, broadcast_f32, fma_f32, fnma_f32, load_f32, store_f32, zero_f32
from .intrin.prefetch import in_order, prefetch_l2
from .intrin.registers import f32x16_array
from .jit import inlined, kernel, routine
from .job import i64
from .packings import AHEAD, AHEAD_L1, AHEAD_L2, LOADS, make_ask, packed_bytes
from .products import make_products
from .silu import silu_mul_f32

MAX_TOKENS = 8
"""Tokens of one pass over the weights: 16 accumulators and the decoder fill the registers."""

ARGUMENTS = 10
"""Of ``tiles``."""


@inlined
def ahead(w, distance, end, then):
    """What lies so far ahead of w in the stream, which jumps from a block's end to ``then``."""
    at = w + distance
    return at if at < end else at + (then - end)


def make_tile(fmt: str, M: int, ops: Instructions, activations: str, digits: bool = False) -> Any:
    """Compiles ``tile(w, then, scale, first, last, K, rows, tables, out)``, M tokens.

    The tile computes ``out[t, n] = sum_k w[n, k] * x_t[k]`` for 32 rows n and M tokens t, over the
    128-wide input blocks ``first .. last - 1``; from ``first`` 0 on, later ones add to ``out``.

    Args of the tile (addresses are int64):
        w: packed block (``quant.layout``), 64-byte aligned.
        then: what is read after it, for prefetches that run ahead beyond its end.
        scale: the block's packed scales, unread if the format has none.
        first, last: input blocks of 128, counted from the start of w, scale and the inputs.
        K: inputs of a row, padded.
        rows: int64 [M], address of each token's row (``cpu.rows``).
        tables: ``decode.TABLES``.
        out: float32 [M, 32].
    """
    reader = make_reader(fmt, ops)
    # Many tokens are chains enough to hide a product's latency.
    chains = 1 if activations == "int8" and M > 4 else 2
    products = make_products(fmt, ops, activations, chains, digits)
    new_sums, begin, read, add = products.new_sums, products.begin, products.read, products.add
    CHAINS = products.chains
    total, offset, scaled = products.total, products.offset, products.scaled
    factor_of, minimum_of = reader.scales.factor, reader.scales.minimum
    # A decoder's work between loads leaves room for prefetches to both levels; bf16, which is only
    # loaded, reads slower with them.
    TWO = fmt != "bf16"
    NEAR = AHEAD_L1 if TWO else AHEAD
    ask_l1, ask_l2 = make_ask(reader.packing), make_ask(reader.packing, prefetch_l2)
    ASKED = reader.packing.asked
    TILE, K_STEP, PARTS = reader.packing.tile_bytes, reader.packing.k_step, reader.packing.parts
    STEPS = K_BLOCK // K_STEP
    # Groups of inputs shorter than a packed tile are added up in registers first.
    GROUP = reader.scales.k or K_BLOCK
    FOLDS = max(1, K_STEP // GROUP)
    # Both halves of the block in one pass: from memory weights come up to twice as fast in the
    # order of their bytes as one KiB in two. Not where accumulators would not fit in registers.
    MOST = 2 if FOLDS > 1 else 8 if activations == "int8" else 4 if fmt in ("bf16", "int8") else 3
    HALVES = 2 if M <= MOST else 1
    BLOCK = packed_bytes(fmt)
    # Lines are asked for in the order of their bytes, half by half too: then one sweep asks for
    # half of what both sweeps of a later block load.
    DISTANCE = NEAR if HALVES == 2 else max(NEAR, BLOCK)
    FURTHER = DISTANCE - NEAR + AHEAD_L2
    OUTS, SUMS = HALVES * M, CHAINS * HALVES * M
    # In groups of four loads one half has too few chains to hide the latency of ``vdpbf16ps``: the
    # halves take turns load by load. Else a tile is read to its end. Bytes bound q8_0, and from
    # memory taking turns costs it a third.
    ALTERNATE = FOLDS == 2 and activations == "bf16" and fmt != "q8_0"
    GROUP_LOADS = LOADS // FOLDS
    # LLVM would put the prefetches of loads that it unrolls first, up to 64 together, and decode
    # more loads at once than there are registers. A fence that is no instruction after each span
    # of loads keeps it from both.
    SPAN = max(2, ASKED)

    @inlined
    def ask(near, far, load):
        ask_l1(near, load)
        if TWO:
            ask_l2(far, load)

    @inlined
    def fold(sums, outs, half, to_half, K, k, rows, scale):
        """outs += the sums of input k's group, times its scale."""
        group = k // GROUP
        for t in range(M):
            i = t * HALVES + half
            value = total(sums, CHAINS * i, i64(rows, t), K, k)
            if factor_of is None:
                value = add_f32(value, outs[i])
            else:
                value = fma_f32(value, factor_of(scale, group, to_half), outs[i])
            if minimum_of is not None:
                less = broadcast_f32(offset(i64(rows, t), K, k))
                value = fnma_f32(less, minimum_of(scale, group, to_half), value)
            outs[i] = value

    @inlined
    def begin_groups(sums, first, last, K, k, rows):
        for t in range(M):
            for half in range(first, last):
                begin(sums, CHAINS * (t * HALVES + half), i64(rows, t), K, k)

    @inlined
    def add_load(sums, half, at, load, tables, rows, K, k):
        for part in range(PARTS):
            weights = read(at + half * TILE, load, part, tables)
            for t in range(M):
                i = CHAINS * (t * HALVES + half)
                to_k = k + 4 * (load * PARTS + part)
                add(sums, i, weights, i64(rows, t), K, to_k, part)

    @inlined
    def read_half(sums, outs, half, to_half, at, near, far, tables, rows, K, k, scale):
        for group in range(FOLDS):
            to_k = k + group * GROUP
            if FOLDS > 1:
                begin_groups(sums, half, half + 1, K, to_k, rows)
            for span in range(GROUP_LOADS // SPAN):
                for some in range(SPAN // ASKED):
                    first_load = group * GROUP_LOADS + span * SPAN + some * ASKED
                    ask(near, far, half * LOADS + first_load)
                    for j in range(ASKED):
                        add_load(sums, half, at, first_load + j, tables, rows, K, k)
                in_order()
            if FOLDS > 1:
                fold(sums, outs, half, to_half, K, to_k, rows, scale)

    @inlined
    def read_alternating(sums, outs, sweep, at, near, far, tables, rows, K, k, scale):
        for group in range(FOLDS):
            to_k = k + group * GROUP
            begin_groups(sums, 0, HALVES, K, to_k, rows)
            for span in range(GROUP_LOADS // SPAN):
                for some in range(SPAN // ASKED):
                    first_load = group * GROUP_LOADS + span * SPAN + some * ASKED
                    for j in range(HALVES):
                        ask(near, far, HALVES * first_load + j * ASKED)
                    for j in range(ASKED):
                        for half in range(HALVES):
                            add_load(sums, half, at, first_load + j, tables, rows, K, k)
                in_order()
            for half in range(HALVES):
                fold(sums, outs, half, sweep + half, K, to_k, rows, scale)

    @kernel(f"{fmt}-{activations}-m{M}-{ops.name}-{CHAINS}")
    def tile(w, then, scale, first, last, K, rows, tables, out):
        if first == 0:
            for i in range(2 * M):
                store_f32(out + 64 * i, zero_f32())
        end = w + K // K_BLOCK * BLOCK
        w += first * BLOCK
        for block in range(first, last):
            next_l1, next_l2 = ahead(w, DISTANCE, end, then), ahead(w, FURTHER, end, then)
            for sweep in range(0, 2, HALVES):
                sums = new_sums(SUMS)  # [M, HALVES, CHAINS]
                outs = f32x16_array(OUTS)  # [M, HALVES]
                for i in range(OUTS):
                    outs[i] = zero_f32()
                if FOLDS == 1:
                    begin_groups(sums, 0, HALVES, K, block * K_BLOCK, rows)
                for step in range(STEPS):
                    k = block * K_BLOCK + step * K_STEP
                    at = w + (2 * step + sweep) * TILE
                    asked = (sweep * STEPS + step) * HALVES * TILE
                    near, far = next_l1 + asked, next_l2 + asked
                    if ALTERNATE:
                        read_alternating(
                            sums, outs, sweep, at, near, far, tables, rows, K, k, scale
                        )
                    else:
                        # No loop over halves: LLVM would not unroll it, and an accumulator whose
                        # index is not a constant lives in memory.
                        read_half(sums, outs, 0, sweep, at, near, far, tables, rows, K, k, scale)
                        if HALVES == 2:
                            read_half(sums, outs, 1, 1, at, near, far, tables, rows, K, k, scale)
                k = block * K_BLOCK
                for half in range(HALVES):
                    if FOLDS == 1:
                        fold(sums, outs, half, sweep + half, K, k, rows, scale)
                    for t in range(M):
                        to = out + 64 * (2 * t + sweep + half)
                        value = scaled(outs[t * HALVES + half], i64(rows, t), K, k)
                        store_f32(to, add_f32(value, load_f32(to)))
            w += BLOCK

    return tile


def make_tiles(fmt: str, ops: Instructions, activations: str, digits: bool = False) -> Any:
    """Compiles the routine ``tiles(M, w, then, scale, first, last, K, rows, tables, out)``.

    ``rows`` must hold MAX_TOKENS addresses, and ``out`` as many rows: an M that has no tile of its
    own runs the next larger one (the pass over the weights is what costs), its last addresses
    repeated.
    """
    if digits and activations == "bf16" and make_reader(fmt, ops).codes:
        return _digit_tiles(fmt, ops)
    tiles = {M: make_tile(fmt, M, ops, activations) for M in (1, 2, 4, 8)}
    return by_tokens(tiles, f"{fmt}-{activations}-{ops.name}")


def by_tokens(each: dict[int, Any], variant: str) -> Any:
    """Compiles ``tiles`` (``make_tiles``) of the tiles of 1, 2, 4 and 8 tokens."""
    tile1, tile2, tile4, tile8 = (each[M] for M in (1, 2, 4, 8))

    @routine(ARGUMENTS, variant)
    def tiles(M, w, then, scale, first, last, K, rows, tables, out):
        if M == 1:
            tile1(w, then, scale, first, last, K, rows, tables, out)
        elif M == 2:
            tile2(w, then, scale, first, last, K, rows, tables, out)
        elif M <= 4:
            tile4(w, then, scale, first, last, K, rows, tables, out)
        else:
            tile8(w, then, scale, first, last, K, rows, tables, out)
        return 0

    return tiles


def _digit_tiles(fmt: str, ops: Instructions) -> Any:
    """``make_tiles`` for bf16 activations as digits: four tokens fill the registers."""
    tiles = {M: make_tile(fmt, M, ops, "bf16", True) for M in (1, 2, 4)}
    tile4 = tiles[4]

    @inlined
    def tile8(w, then, scale, first, last, K, rows, tables, out):
        for block in range(first, last):
            tile4(w, then, scale, block, block + 1, K, rows, tables, out)
            tile4(w, then, scale, block, block + 1, K, rows + 32, tables, out + 512)

    return by_tokens({**tiles, 8: tile8}, f"{fmt}-digits-{ops.name}")


def make_silu_mul_row(ops: Instructions) -> Any:
    """``silu_mul_row(gate, up, h)``: h[0:32] = bf16(silu(gate[0:32]) * up[0:32])."""
    store_bf16 = ops.store_bf16

    @inlined
    def silu_mul_row(gate, up, h):
        for i in range(2):
            value = silu_mul_f32(load_f32(gate + 64 * i), load_f32(up + 64 * i))
            store_bf16(h + 32 * i, value)

    return silu_mul_row


@inlined
def weighted_add_row(weight, value, acc):
    """acc[0:32] += weight * value[0:32]."""
    for i in range(2):
        at = acc + 64 * i
        store_f32(at, fma_f32(broadcast_f32(weight), load_f32(value + 64 * i), load_f32(at)))
