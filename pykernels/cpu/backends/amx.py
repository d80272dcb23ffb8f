"""AMX: its GEMM for many tokens, its tiles for a few, and those of AVX-512 for one or two."""

from __future__ import annotations

from typing import Any

from ...amx_state import request_permission
from ...target import Target, detect
from ..activations.quantize_vectors import make_quantize_row
from ..activations.row_layout import row_format
from ..gemm.amx import SCRATCH_BYTES, make_gemm
from ..gemv import amx as gemv_amx
from ..gemv import avx512 as gemv_avx512
from ..intrin import amx
from ..isa import Instructions, instructions
from ..weights.layout import INTEGERS, PACKINGS, WIDE
from . import avx512
from .avx512 import epilogue
from .parts import Parts

GEMM_FROM = 5
"""Tokens of an expert from which the GEMM is taken to win: more than four (SOSP'25 Figure 7)."""

# As an Emerald Rapids calibrated it (bench/notes/cpu-gemm-amx.md): tiles that AMX helps, and int8
# inputs, put the GEMM off. Up to these counts tiles take 0.45 to 0.99 of its time.
_LATER = {
    ("bf16", "bf16"): 9,
    ("fp8", "bf16"): 9,
    ("fp8-channel", "bf16"): 9,
    ("int4-g128", "bf16"): 9,
    ("int8", "bf16"): 12,
    ("int8-channel", "bf16"): 12,
    ("q8_0", "bf16"): 12,
    ("int8", "int8"): 10,
    ("int8-channel", "int8"): 9,
    ("int4", "int8"): 16,
    ("int4-g128", "int8"): 16,
    ("int4-channel", "int8"): 10,
    ("q6_k", "int8"): 16,
    **dict.fromkeys(((fmt, "int8") for fmt in ("q8_0", "q4_0", "q5_0", "iq4_nl")), 16),
    ("int4-zp-g128", "bf16"): 9,
    ("int4-zp", "int8"): 16,
    ("int4-zp-g128", "int8"): 16,
    ("q4_k", "int8"): 24,
    ("q5_k", "int8"): 24,
    ("q4_1", "int8"): 24,
    ("q5_1", "int8"): 24,
}


def make(fmt: str, activations: str) -> Parts:
    """Compiles the parts for this machine. The caller has checked ``registry`` first: compiling for
    a CPU that lacks the instructions aborts."""
    request_permission()
    return parts(fmt, activations, instructions(detect()), amx)


def parts(fmt: str, activations: str, ops: Instructions, amx_unit: Any) -> Parts:
    """The parts.

    Args:
        ops: the AVX-512 operations beside the tiles.
        amx_unit: ``intrin.amx``, or ``intrin.amx_model`` where there is none.
    """
    if fmt in WIDE:
        return avx512.parts(fmt, activations, ops)
    how, gemm_how = row_format(fmt, activations, "int8_slices"), row_format(fmt, activations)
    if activations == "bf16":
        tiles = gemv_amx.make_tiles(fmt, ops, amx_unit)
    else:
        tiles = gemv_avx512.make_tiles(fmt, ops, activations, int8_slices=True)
    return Parts(
        tiles=tiles,
        epilogue=epilogue(ops),
        row_format=how,
        quantize_row=make_quantize_row(how, "avx512") if how else None,
        gemm=make_gemm(fmt, ops, activations, amx_unit),
        gemm_row_format=gemm_how,
        gemm_quantize_row=make_quantize_row(gemm_how, "avx512") if gemm_how else None,
        scratch_bytes=SCRATCH_BYTES,
        interleave_a=PACKINGS[fmt].fours and activations == "bf16",
    )


def gemm_from(fmt: str, activations: str, target: Target) -> int:
    """Tokens of an expert from which the GEMM is taken to win without a calibration."""
    if fmt in WIDE:
        return avx512.gemm_from(fmt, activations, target)
    return _LATER.get((fmt, activations), GEMM_FROM)


def batch_invariant_to(fmt: str, activations: str) -> int | None:
    """Tokens of a pass up to which each one's products are the bits that it has alone; None for any
    number: AMX adds up integers exactly, bfloat16 in another order than AVX-512."""
    if activations == "int8" or fmt in INTEGERS or fmt not in gemv_amx.FROM:
        return None
    return gemv_amx.FROM[fmt] - 1


def instruction(activations: str, target: Target) -> str:
    """What the GEMM multiplies with."""
    return "tdpbssd" if activations == "int8" else "tdpbf16ps"
