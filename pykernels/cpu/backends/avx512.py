"""AVX-512: tiles of few tokens, and a GEMM of bfloat16 or int8 dot products or multiply-adds."""

from __future__ import annotations

import functools
from collections.abc import Callable

from ...shapes import ExpertSpec
from ...target import Target, detect
from ..activations.quantize_vectors import make_quantize_row
from ..activations.row_layout import row_format
from ..gemm import avx512 as dot_gemm
from ..gemm import fma_avx512 as fma_gemm
from ..gemv.avx512 import make_tiles, takes_slices
from ..intrin import avx512
from ..isa import Instructions, instructions, prefers_fma, prefers_int8_slices
from ..moe.epilogue import Epilogue
from ..moe.epilogue_vectors import make_epilogue
from ..weights.layout import INTEGERS, PACKINGS, WIDE
from .parts import Parts

GEMM_FROM = 9
"""Tokens of an expert from which the GEMM is taken to win: more than a pass of tiles takes."""

# Where bfloat16 products are slow, as calibrated on an Emerald Rapids without AMX, two threads.
# Tiles of int8 slices (``isa.prefers_int8_slices``) hold out against multiply-adds
# (``isa.prefers_fma``) the longer the fewer groups have a scale of their own: a tie within 4 % from
# 32 tokens on where groups are wide. bfloat16's hold out until reading no longer bounds them. With
# int8 inputs two passes of tiles still win.
_INT8_FROM = 16
_FMA_FROM, _FMA_SLICES_FROM = 5, 24
_FMA_LATER = {"bf16": 12, "f16": 12, "q6_k": 12, "q5_k": 16} | dict.fromkeys(
    ("int8", "int8-channel", "int4-g128", "int4-channel", "int4-zp-g128"), 128
)


_SLICES_FROM = 5
"""The same where bfloat16 products are fast and a format's tiles multiply int8 slices all the same:
three for two products of the GEMM, so that tiles win only while memory bounds them."""


def make(fmt: str, activations: str) -> Parts:
    """Compiles the parts for this machine. The caller has checked ``registry`` first: compiling for
    a CPU that lacks the instructions aborts."""
    return parts(fmt, activations, instructions(detect()))


def parts(fmt: str, activations: str, ops: Instructions) -> Parts:
    """The parts by the operations of ``ops``."""
    slices = takes_slices(fmt, ops)
    how = row_format(fmt, activations, "int8_slices" if slices else "magic")
    quantize_row = make_quantize_row(how, "avx512") if how else None
    tiles = make_tiles(fmt, ops, activations, slices)
    interleave_a = PACKINGS[fmt].fours and activations == "bf16"
    if (ops.fma or fmt in WIDE) and activations == "bf16":
        # Multiply-adds take minima into the weights: they need no sums of the inputs.
        return Parts(
            tiles,
            epilogue(ops),
            how,
            quantize_row,
            fma_gemm.make_gemm(fmt, ops),
            scratch_bytes=fma_gemm.SCRATCH_BYTES,
            interleave_a=interleave_a,
        )
    gemm_how = row_format(fmt, activations)
    return Parts(
        tiles,
        epilogue(ops),
        how,
        quantize_row,
        dot_gemm.make_gemm(fmt, ops, activations),
        gemm_how,
        make_quantize_row(gemm_how, "avx512") if gemm_how else None,
        dot_gemm.SCRATCH_BYTES,
        interleave_a,
    )


def epilogue(ops: Instructions) -> Callable[[ExpertSpec], Epilogue]:
    """The stages' epilogues by the operations of ``ops``."""
    return functools.partial(make_epilogue, ops.name, avx512, 16, ops.store_bf16)


def gemm_from(fmt: str, activations: str, target: Target) -> int:
    """Tokens of an expert from which the GEMM is taken to win without a calibration."""
    if prefers_int8_slices(target) and fmt in INTEGERS:
        return _FMA_LATER.get(fmt, _FMA_SLICES_FROM) if activations == "bf16" else _INT8_FROM
    if (prefers_fma(target) or fmt in WIDE) and activations == "bf16":
        return _FMA_LATER.get(fmt, _FMA_FROM)
    if activations == "bf16" and takes_slices(fmt, instructions(target)):
        return _SLICES_FROM
    return GEMM_FROM


def instruction(activations: str, target: Target) -> str:
    """What the GEMM multiplies with."""
    if activations == "int8":
        return "vpdpbusd"
    return "vfmadd231ps" if prefers_fma(target) else "vdpbf16ps"
