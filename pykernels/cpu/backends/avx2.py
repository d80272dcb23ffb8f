"""AVX2: tiles of few tokens, and a GEMM of multiply-adds; AVX-VNNI's products where there are."""

from __future__ import annotations

import functools

from ...target import Target, detect
from ..activations.quantize_vectors import make_quantize_row
from ..gemm.fma_avx2 import SCRATCH_BYTES, make_gemm
from ..gemv.avx2 import make_tiles, tile_row_format
from ..intrin import avx2
from ..moe.epilogue_vectors import make_epilogue
from .parts import Parts

GEMM_FROM = 9
"""Tokens of an expert from which the GEMM is taken to win: more than a pass of tiles takes."""


def make(fmt: str, activations: str) -> Parts:
    """Compiles the parts for this machine. The caller has checked ``registry`` first: compiling for
    a CPU that lacks the instructions aborts."""
    return parts(fmt, activations, has_vnni(detect()))


def has_vnni(target: Target) -> bool:
    """Whether the CPU has ``vpdpbusd`` of 256 bits."""
    return not target.lacks(("avxvnni",))


def parts(fmt: str, activations: str, vnni: bool) -> Parts:
    """The parts, with AVX-VNNI or without."""
    how = tile_row_format(fmt, activations)
    epilogue = functools.partial(make_epilogue, "avx2", avx2, 8, avx2.store_bf16)
    tiles = make_tiles(fmt, activations, vnni)
    quantize_row = make_quantize_row(how, "avx2")
    if activations == "int8":  # tiles of 8 tokens are as fast as it gets
        return Parts(
            tiles, epilogue, how, quantize_row, gemm_row_format=how, gemm_quantize_row=quantize_row
        )
    gemm = make_gemm(fmt)
    return Parts(tiles, epilogue, how, quantize_row, gemm, scratch_bytes=SCRATCH_BYTES)


def gemm_from(fmt: str, activations: str, target: Target) -> int | None:
    """Tokens of an expert from which the GEMM is taken to win without a calibration; None for
    tiles always."""
    return GEMM_FROM if activations == "bf16" else None


def instruction(activations: str, target: Target) -> str:
    """What many tokens are multiplied with."""
    if activations == "int8":
        return "vpdpbusd ymm" if has_vnni(target) else "vpmaddubsw ymm"
    return "vfmadd231ps ymm"
