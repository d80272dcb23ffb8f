"""Launch plans of attention worth timing, by kind, size and the GPU's compute capability."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from bench.cases.attention import D_MLA, PAGE, L, R
from bench.cases.attention_size import Size
from pykernels.gpu.plans.attention import (
    DecodePlan,
    PrefillPlan,
    fp8_mma_fits,
    ring_buffer_fits,
    warp_specialized_fits,
    warp_specialized_prefill_fits,
)

_RINGS = ((6, 1), (5, 1), (4, 1), (3, 1), (3, 2), (2, 2))
"""(stages, CTAs an SM) of 32 KiB a stage."""


def candidates(size: Size, capability: tuple[int, int]) -> Iterator[DecodePlan | PrefillPlan]:
    """Plans for a size on such a GPU; some may not fit into its shared memory."""
    if size.kind == "mla_decode":
        yield from _mla_decode(size, capability)
    elif size.kind == "gqa_decode":
        yield from _gqa_decode(size, capability)
    else:
        yield from _prefill(size, capability)


def _mla_decode(size: Size, capability: tuple[int, int]) -> Iterator[DecodePlan]:
    if capability[0] == 9 and warp_specialized_fits(L, R, size.format == "fp8", PAGE):
        for ctas_per_sm, min_blocks in itertools.product(
            (1, 2), (1, 2, 3, 4)
        ):  # 2 an SM: two waves
            yield DecodePlan(
                64, 64, 8, 2, ctas_per_sm, warp_specialized=True, min_blocks=min_blocks
            )
    rows = size.heads * size.queries
    if rows <= 16 or capability[0] != 9:
        for keys, num_stages, ctas_per_sm in itertools.product((32, 64), (2, 3), (1, 2)):
            yield DecodePlan(16, keys, 8, num_stages, ctas_per_sm)
        for keys, ctas_per_sm in itertools.product((16, 32), (1, 2)):
            yield DecodePlan(16, keys, 4, 2, ctas_per_sm)
    if rows > 16 and capability[0] >= 9:
        for split_scores in (True, False):
            for keys, num_stages in ((64, 2), (32, 3)):
                yield DecodePlan(64, keys, 8, num_stages, 1, split_scores)


def _gqa_decode(size: Size, capability: tuple[int, int]) -> Iterator[DecodePlan]:
    rows, fp8 = size.heads // size.kv_heads * size.queries, size.format == "fp8"
    tile = max(16, min(64, 1 << (rows - 1).bit_length()))
    if capability[0] == 9 and ring_buffer_fits(size.head_dim, fp8, PAGE):
        for num_stages, ctas_per_sm in _RINGS:
            yield DecodePlan(16, 64, 4, num_stages, ctas_per_sm, ring_buffer=True)
    if capability >= (8, 9) and rows <= 16 and fp8_mma_fits(size.head_dim, fp8, PAGE):
        few = 8 if rows <= 8 else 16
        for (keys, num_warps), ctas_per_sm in itertools.product(
            ((64, 4), (128, 4), (128, 8)), (1, 2, 3)
        ):
            yield DecodePlan(few, keys, num_warps, 1, ctas_per_sm, fp8_mma=True)
    for keys, num_stages, ctas_per_sm in itertools.product((32, 64, 128), (2, 3, 4), (1, 2)):
        if 64 <= keys * (num_stages - 1) <= 256 and keys * size.head_dim <= 1 << 14:
            yield DecodePlan(tile, keys, 4, num_stages, ctas_per_sm)


def _prefill(size: Size, capability: tuple[int, int]) -> Iterator[PrefillPlan]:
    mla = size.kind == "mla_prefill"
    D, DV, rope = (D_MLA, D_MLA, R) if mla else (*[size.head_dim] * 2, 0)
    for keys in (64, 128) if capability[0] == 9 else ():
        if warp_specialized_prefill_fits(D, DV, rope, 0, keys):
            yield PrefillPlan(128, keys, 8, 1, warp_specialized=True)
    tiles = ((128, 8), (64, 4)) if capability[0] >= 9 else ((128, 4), (128, 8), (64, 4))
    for (rows, num_warps), keys, num_stages in itertools.product(tiles, (32, 64, 128), (2, 3)):
        if keys <= rows and (keys > 32 or capability[0] != 9) and keys * (D + DV) <= 1 << 15:
            yield PrefillPlan(rows, keys, num_warps, num_stages)
