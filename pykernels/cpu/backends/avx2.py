"""AVX2: tiles of few tokens, and a GEMM of multiply-adds; AVX-VNNI's products where there are."""

from __future__ import annotations

from ...target import Target, detect
from ..activations.quantize_vectors import make_quantize_row
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
    epilogue = make_epilogue("avx2", avx2, 8, avx2.store_bf16)
    tiles = make_tiles(fmt, activations, vnni)
    return Parts(tiles, epilogue, how, make_quantize_row(how, "avx2"))
