"""Launch plans worth timing, by operation and number of rows."""

from __future__ import annotations

from collections.abc import Iterator

from pykernels.gpu.common.launch import H200_SMS
from pykernels.gpu.gemm.hopper.dequant import EXPERT_KINDS
from pykernels.gpu.plans.gemm import (
    DequantPlan,
    GemmPlan,
    GemvInt8Plan,
    GemvMmaPlan,
    LinearPlan,
    SkinnyExpertsPlan,
    SkinnyPlan,
)
from pykernels.gpu.plans.registers import even_shares
from pykernels.gpu.plans.tuned import EXPERTS_PLANS, LINEAR_PLANS

# (block_m, block_n, block_k, warps, stages)
_BF16 = (
    (128, 256, 64, 8, 3),
    (128, 256, 64, 8, 4),
    (128, 256, 128, 8, 2),
    (256, 128, 64, 8, 4),
    (128, 128, 64, 4, 4),
    (128, 128, 64, 8, 4),
    (128, 128, 128, 8, 3),
    (64, 256, 64, 4, 4),
    (64, 256, 64, 8, 4),
    (64, 128, 64, 4, 4),
    (64, 128, 128, 4, 3),
)
_BF16_SKINNY = (
    (16, 64, 128, 4, 4),
    (16, 128, 128, 4, 3),
    (16, 128, 128, 4, 4),
    (16, 128, 64, 4, 6),
    (16, 256, 64, 8, 4),
    (16, 64, 256, 4, 3),
    (64, 128, 64, 4, 4),
    (64, 64, 128, 4, 4),
)
_FP8 = (
    (128, 128, 128, 8, 3),
    (128, 128, 128, 8, 4),
    (128, 64, 128, 8, 4),
    (128, 64, 128, 4, 4),
    (64, 128, 128, 4, 3),
    (64, 128, 128, 4, 4),
    (64, 128, 128, 8, 4),
    (64, 64, 128, 4, 4),
    (64, 64, 128, 4, 6),
    (32, 128, 128, 4, 4),
    (256, 64, 128, 8, 3),
)
_DEQUANT_TILES_SKINNY = (
    (16, 64, 128, 4, 3),
    (16, 64, 128, 4, 4),
    (16, 64, 128, 4, 6),
    (16, 64, 256, 4, 3),
    (16, 64, 64, 4, 6),
    (16, 128, 128, 4, 3),
    (16, 128, 128, 8, 4),
    (16, 128, 256, 8, 3),
    (16, 64, 512, 4, 2),
)
_DEQUANT_TILES = (
    (128, 128, 128, 8, 2),
    (128, 128, 128, 8, 3),
    (128, 128, 64, 8, 4),
    (128, 64, 128, 4, 3),
    (128, 64, 64, 4, 4),
    (64, 128, 128, 8, 3),
    (64, 64, 128, 4, 3),
    (64, 64, 128, 4, 4),
    (256, 64, 64, 4, 3),
    (256, 64, 64, 8, 3),
)
_GEMV_INT8 = [
    GemvInt8Plan(block_n, words, num_warps, num_stages)
    for block_n, words, num_warps in (
        (4, 128, 1),
        (8, 128, 1),
        (8, 128, 2),
        (8, 128, 4),
        (16, 128, 2),
        (16, 128, 4),
        (32, 128, 4),
        (8, 256, 2),
        (16, 256, 2),
        (16, 256, 4),
        (8, 512, 4),
        (16, 64, 2),
    )
    for num_stages in (2, 3, 5)
]
_GEMV_MMA = (
    [
        GemvMmaPlan(rows, num_warps, ahead, rounds * H200_SMS)
        for rows, num_warps, ahead in (
            (16, 4, 2),
            (16, 4, 3),
            (16, 4, 4),
            (16, 8, 1),
            (16, 8, 2),
            (16, 8, 4),
            (32, 8, 1),
            (32, 8, 2),
        )
        for rounds in (0, 2, 3)
    ]
    + [
        GemvMmaPlan(rows, num_warps, ahead, registers=128, used=used)
        for rows, num_warps, ahead, used in (
            (16, 4, 3, 0),
            (16, 4, 4, 0),
            (16, 4, 4, 14),
            (16, 4, 2, 14),
            (16, 8, 1, 0),
            (16, 8, 2, 0),
            (16, 8, 2, 14),
            (16, 8, 3, 0),
            (16, 8, 4, 0),
            (32, 8, 1, 0),
            (32, 8, 1, 28),
            (32, 8, 2, 28),
            (32, 8, 3, 28),
        )
    ]
    + [
        *(
            GemvMmaPlan(16, 4, ahead, 3 * H200_SMS, registers=registers)
            for ahead in (2, 3, 4)
            for registers in (160, 168)
        ),
        GemvMmaPlan(16, 16, 3, H200_SMS, registers=128),
    ]
)
_SKINNY = [
    SkinnyPlan(rows, num_warps, chunks)
    for rows, num_warps, chunks in (
        (16, 2, 1),
        (16, 4, 1),
        (16, 4, 2),
        (16, 8, 1),
        (16, 8, 2),
        (16, 16, 1),
        (32, 2, 1),
        (32, 4, 1),
        (32, 4, 2),
        (32, 8, 1),
        (32, 8, 2),
        (64, 2, 1),
        (64, 4, 1),
        (64, 8, 1),
    )
] + [SkinnyPlan(16, num_warps, chunks, ahead=2) for num_warps in (4, 8) for chunks in (1, 2)]
_SKINNY_EXPERTS = [
    (rows, num_warps, chunks, ahead)
    for rows, num_warps, chunks in (
        (16, 1, 1),
        (16, 2, 1),
        (16, 2, 2),
        (16, 4, 1),
        (16, 4, 2),
        (32, 2, 1),
        (32, 4, 1),
        (32, 4, 2),
        (16, 8, 1),
        (32, 8, 1),
    )
    for ahead in (1, 2)
]
_DEQUANT = [
    DequantPlan(cols, num_warps, num_stages, words, split)
    for cols, num_warps, num_stages, words in (
        (16, 4, 4, 4),
        (16, 4, 6, 6),
        (32, 4, 4, 4),
        (32, 4, 6, 6),
        (64, 4, 4, 3),
        (64, 4, 4, 4),
        (64, 4, 6, 6),
        (128, 4, 3, 4),
        (128, 4, 4, 4),
        (256, 4, 3, 4),
        (256, 8, 5, 4),
    )
    for split in ((1, 2, 4) if cols <= 128 else (1, 2) if num_warps == 4 else (1,))
]
_DEQUANT_STREAM_K = [
    even_shares(cols, num_warps, num_stages, words, programs, H200_SMS)
    for cols, num_warps, num_stages, words, programs_per_sm in (
        (16, 4, 6, 6, (4, 6)),
        (32, 4, 6, 6, (4,)),
        (32, 8, 4, 4, (2, 3)),
        (64, 4, 4, 4, (3, 4)),
        (64, 8, 4, 4, (2,)),
        (64, 8, 3, 4, (3,)),
        (128, 4, 3, 4, (3,)),
        (128, 8, 3, 3, (2,)),
        (256, 4, 3, 4, (2,)),
        (256, 8, 5, 4, (1,)),
    )
    for programs in programs_per_sm
]
_FIXED: dict[type, list[LinearPlan]] = {
    GemvInt8Plan: [*_GEMV_INT8],
    GemvMmaPlan: [*_GEMV_MMA],
    SkinnyPlan: [*_SKINNY],
}


def candidates(op: str, path: str, rows: int) -> Iterator[LinearPlan]:
    """Plans for ``rows`` rows an expert (or a linear)."""
    kind = {**LINEAR_PLANS, **EXPERTS_PLANS}.get(op)
    if kind is SkinnyExpertsPlan:  # four scales side by side: K-quants, and groups of 32
        for most in (2, 4) if path.endswith("_k") else (8,):
            for some, num_warps, chunks, ahead in _SKINNY_EXPERTS:
                yield SkinnyExpertsPlan(some, num_warps, most, chunks, ahead)
        return
    if kind is DequantPlan:
        yield from (plan for plan in _DEQUANT + _DEQUANT_STREAM_K if plan.cols < 2 * rows)
        return
    if kind in _FIXED:
        yield from _FIXED[kind]
        return
    if path in ("bf16", "fp8"):
        many = _FP8 if path == "fp8" else _BF16
        for bm, bn, bk, num_warps, num_stages in (
            _BF16_SKINNY if path == "bf16" and rows <= 16 else many
        ):
            yield GemmPlan(bm, bn, bk, 16, 1, num_warps, num_stages, tma=True)
        if rows > 16 and (path == "fp8" or op != "linear"):
            for group_m in (4, 8, 16, 32):
                yield GemmPlan(128, 128, 128, group_m, warp_specialized=True)
        if rows > 16:
            for bm, bn, bk, num_warps, num_stages in many[:1]:
                yield GemmPlan(bm, bn, bk, 16, 1, num_warps, num_stages)
            for bm, bn, bk, num_warps, num_stages in many[1:5] if op == "gate_up" else ():
                yield GemmPlan(bm, bn, bk, 16, 1, num_warps, num_stages, tma=True, copy=True)
        return
    if path in EXPERT_KINDS and op != "linear":
        yield from (plan for plan in _DEQUANT if plan.cols < 2 * rows and plan.split_k == 1)
    for bm, bn, bk, num_warps, num_stages in (
        _DEQUANT_TILES_SKINNY if rows <= 16 else _DEQUANT_TILES
    ):
        for split in (1, 2, 4, 8) if op == "linear" and rows <= 16 else (1,):
            yield GemmPlan(bm, bn, bk, 16, split, num_warps, num_stages)
