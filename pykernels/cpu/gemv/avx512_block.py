"""A packed block, 32 outputs by 128 inputs, times M tokens in AVX-512: what tiles do for each.

The inner loops of OSDI'26 Figure 10: over scale groups of the inputs, over dot products inside a
group with no multiply by the scale, one multiply-add into the running sum at its end (the scale
epilogue). What a dot product is, bfloat16 or int8, is in ``dot``.

Each output is summed in the same order whatever M is, or in integers, so a token's result does not
depend on its batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...quant.layout import K_BLOCK
from ..intrin.avx512 import add_f32, broadcast_f32, fma_f32, fnma_f32, load_f32, store_f32, zero_f32
from ..intrin.prefetch import in_order, prefetch_l2
from ..intrin.registers import f32x16_array
from ..isa import Instructions
from ..jit import inlined
from ..weights.dequant import make_reader
from ..weights.layout import AHEAD, AHEAD_L1, AHEAD_L2, LOADS, make_prefetch, packed_bytes
from ..words import i64
from .dot import Products


@dataclass(frozen=True)
class Block:
    """How a block is multiplied.

    Attributes:
        multiply: ``multiply(w, near, far, scale, block, K, rows, tables, out)`` adds the products
            of the packed block at w, number ``block`` of its K, to ``out`` [M, 32]. It prefetches
            as many bytes from ``near`` on to L1, from ``far`` on to L2.
        distance, further: bytes that ``near`` and ``far`` run ahead of w.
    """

    multiply: Callable
    distance: int
    further: int


def make_block(fmt: str, M: int, ops: Instructions, activations: str, products: Products) -> Block:
    """The block of a format for M tokens, by ``products``."""
    reader = make_reader(fmt, ops)
    new_sums, begin, read, add = products.new_sums, products.begin, products.read, products.add
    CHAINS = products.chains
    total, offset, scaled = products.total, products.offset, products.scaled
    factor_of, minimum_of = reader.scales.factor, reader.scales.minimum
    # Dequantization between loads leaves room for prefetches to both levels; bf16, which is only
    # loaded, reads slower with them, and f16 is as wide.
    TWO = fmt not in ("bf16", "f16")
    NEAR = AHEAD_L1 if TWO else AHEAD
    prefetch_near = make_prefetch(reader.packing)
    prefetch_far = make_prefetch(reader.packing, prefetch_l2)
    PREFETCH_LOADS = reader.packing.prefetch_loads
    TILE, K_STEP, PARTS = reader.packing.tile_bytes, reader.packing.k_step, reader.packing.parts
    STEPS = K_BLOCK // K_STEP
    # Groups of inputs shorter than a packed tile are added up in registers first.
    GROUP = reader.scales.k or K_BLOCK
    TILE_GROUPS = max(1, K_STEP // GROUP)
    # Both halves of the block in one pass: from memory weights come up to twice as fast in the
    # order of their bytes as one KiB in two. Not where accumulators would not fit in registers.
    MOST = (
        2
        if TILE_GROUPS > 1
        else 8
        if activations == "int8"
        else 4
        if fmt in ("bf16", "int8")
        else 3
    )
    HALVES = 2 if M <= MOST else 1
    # Lines are prefetched in the order of their bytes, half by half too: then one sweep prefetches
    # half of what both sweeps of a later block load.
    DISTANCE = NEAR if HALVES == 2 else max(NEAR, packed_bytes(fmt))
    FURTHER = DISTANCE - NEAR + AHEAD_L2
    OUTS, SUMS = HALVES * M, CHAINS * HALVES * M
    # In groups of four loads one half has too few chains to hide the latency of ``vdpbf16ps``: the
    # halves take turns load by load. Else a tile is read to its end. Bytes bound q8_0, and from
    # memory taking turns costs it a third.
    ALTERNATE = TILE_GROUPS == 2 and activations == "bf16" and fmt != "q8_0"
    GROUP_LOADS = LOADS // TILE_GROUPS
    # LLVM would put the prefetches of loads that it unrolls first, up to 64 together, and
    # dequantize more loads at once than there are registers. A fence that is no instruction after
    # each span of loads keeps it from both.
    PER = min(PREFETCH_LOADS, GROUP_LOADS)
    TOGETHER = PREFETCH_LOADS // PER  # groups whose lines are prefetched with the first of them
    SPAN = max(2, PER)

    @inlined
    def prefetch(near, far, load):
        prefetch_near(near, load)
        if TWO:
            prefetch_far(far, load)

    @inlined
    def apply_scales(sums, outs, half, to_half, K, k, rows, scale):
        """outs += the sums of input k's group, times its scale."""
        group = k // GROUP
        if factor_of is not None:
            factor = factor_of(scale, group, to_half)
        if minimum_of is not None:
            minimum = minimum_of(scale, group, to_half)
        for t in range(M):
            i = t * HALVES + half
            value = total(sums, CHAINS * i, i64(rows, t), K, k)
            if factor_of is None:
                value = add_f32(value, outs[i])
            else:
                value = fma_f32(value, factor, outs[i])
            if minimum_of is not None:
                value = fnma_f32(broadcast_f32(offset(i64(rows, t), K, k)), minimum, value)
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
        for group in range(TILE_GROUPS):
            to_k = k + group * GROUP
            if TILE_GROUPS > 1:
                begin_groups(sums, half, half + 1, K, to_k, rows)
            for span in range(GROUP_LOADS // SPAN):
                for some in range(SPAN // PER):
                    first_load = group * GROUP_LOADS + span * SPAN + some * PER
                    if group % TOGETHER == 0:
                        prefetch(near, far, half * LOADS + first_load)
                    for j in range(PER):
                        add_load(sums, half, at, first_load + j, tables, rows, K, k)
                in_order()
            if TILE_GROUPS > 1:
                apply_scales(sums, outs, half, to_half, K, to_k, rows, scale)

    @inlined
    def read_alternating(sums, outs, sweep, at, near, far, tables, rows, K, k, scale):
        for group in range(TILE_GROUPS):
            to_k = k + group * GROUP
            begin_groups(sums, 0, HALVES, K, to_k, rows)
            for span in range(GROUP_LOADS // SPAN):
                for some in range(SPAN // PREFETCH_LOADS):
                    first_load = group * GROUP_LOADS + span * SPAN + some * PREFETCH_LOADS
                    for j in range(HALVES):
                        prefetch(near, far, HALVES * first_load + j * PREFETCH_LOADS)
                    for j in range(PREFETCH_LOADS):
                        for half in range(HALVES):
                            add_load(sums, half, at, first_load + j, tables, rows, K, k)
                in_order()
            for half in range(HALVES):
                apply_scales(sums, outs, half, sweep + half, K, to_k, rows, scale)

    @inlined
    def multiply(w, near, far, scale, block, K, rows, tables, out):
        for sweep in range(0, 2, HALVES):
            sums = new_sums(SUMS)  # [M, HALVES, CHAINS]
            outs = f32x16_array(OUTS)  # [M, HALVES]
            for i in range(OUTS):
                outs[i] = zero_f32()
            if TILE_GROUPS == 1:
                begin_groups(sums, 0, HALVES, K, block * K_BLOCK, rows)
            for step in range(STEPS):
                k = block * K_BLOCK + step * K_STEP
                at = w + (2 * step + sweep) * TILE
                done = (sweep * STEPS + step) * HALVES * TILE
                l1, l2 = near + done, far + done
                if ALTERNATE:
                    read_alternating(sums, outs, sweep, at, l1, l2, tables, rows, K, k, scale)
                else:
                    # No loop over halves: LLVM would not unroll it, and an accumulator whose
                    # index is not a constant lives in memory.
                    read_half(sums, outs, 0, sweep, at, l1, l2, tables, rows, K, k, scale)
                    if HALVES == 2:
                        read_half(sums, outs, 1, 1, at, l1, l2, tables, rows, K, k, scale)
            k = block * K_BLOCK
            for half in range(HALVES):
                if TILE_GROUPS == 1:
                    apply_scales(sums, outs, half, sweep + half, K, k, rows, scale)
                for t in range(M):
                    to = out + 64 * (2 * t + sweep + half)
                    value = scaled(outs[t * HALVES + half], i64(rows, t), K, k)
                    store_f32(to, add_f32(value, load_f32(to)))

    return Block(multiply, DISTANCE, FURTHER)
