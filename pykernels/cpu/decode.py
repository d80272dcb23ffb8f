"""Packed weights to bfloat16 pair-rows, exactly, 64 weights at a time: one reader a format.

A reader turns 4 inputs of 16 outputs into the two 64-byte rows that ``vdpbf16ps`` and a B tile of
TDPBF16PS take: ``16 n x (k, k + 1)`` and ``16 n x (k + 2, k + 3)``. Codes of 8 bits or fewer go
through tables of the low and the high byte of their bfloat16 (OSDI'26 section 3.4 shifts bits
instead, which loses E4M3's subnormals: ``vdpbf16ps`` takes unbiased ones for zeros).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..quant import mxfp4
from .intrin.avx512 import (
    abs_i8,
    broadcast_u8,
    even_dwords,
    high_nibbles,
    interleave_high,
    interleave_low,
    load_u8,
    lookup_16,
    lookup_128,
    low_nibbles,
    odd_dwords,
    or_masked,
)
from .intrin.prefetch import prefetch_l1
from .jit import inlined

AHEAD = 4096
"""Bytes that the prefetch of a stream runs ahead of its loads: one page."""

_E4M3_AT, _INT8_AT, _INT4_AT, _MXFP4_AT = 0, 256, 512, 640


def _decode_tables() -> torch.Tensor:
    """uint8 [768] at a 64-byte-aligned address: low bytes, then high bytes, of bf16(code).

    E4M3 and magnitudes 0 .. 127 have 128 entries each; int4 and E2M1 have 16, once for each
    128-bit lane.
    """

    def bytes_of(values: torch.Tensor, copies: int = 1) -> torch.Tensor:
        return values.to(torch.bfloat16).view(torch.uint8).view(-1, 2).T.repeat(1, copies).flatten()

    codes = torch.arange(128, dtype=torch.uint8)
    nibbles = torch.tensor([*range(8), *range(-8, 0)])
    e4m3 = codes.view(torch.float8_e4m3fn)
    parts = (e4m3, 1), (codes, 1), (nibbles, 4), (mxfp4.VALUES, 4)
    tables = torch.cat([bytes_of(values, copies) for values, copies in parts])
    raw = torch.empty(len(tables) + 64, dtype=torch.uint8)
    skip = -raw.data_ptr() % 64
    aligned = raw[skip : skip + len(tables)]
    aligned.copy_(tables)
    return aligned


TABLES = _decode_tables()
"""Passed to the readers by address, so that compiled kernels hold no pointer of this process."""


@dataclass(frozen=True)
class Reader:
    """How a format's blocks are read.

    Attributes:
        rows: ``rows(w, part, tables, ahead) -> (row, row)``, the ``part``-th 64 weights at address
            ``w``; asks for the line ``ahead`` bytes on.
        load_bytes: bytes that ``w`` moves on after all parts.
        parts: lots of 64 weights at one ``w``.
        k_step: inputs of a packed tile: 32 in pairs, 64 in fours.
        scale_k: inputs of one scale; 0 for no scales.
        scale_rows: a scale for each output (bf16 [32]) rather than one for the block (float32).
    """

    rows: Callable
    load_bytes: int
    parts: int
    k_step: int
    scale_k: int
    scale_rows: bool

    @property
    def loads(self) -> int:
        """Loads of one packed tile (16 outputs by k_step inputs)."""
        return self.k_step // 4 // self.parts

    @property
    def tile_bytes(self) -> int:
        return self.loads * self.load_bytes

    @property
    def scale_step_bytes(self) -> int:
        """Packed scale bytes of a block for ``scale_k`` inputs."""
        return 64 if self.scale_rows else 4


@inlined
def _bf16(w, part, tables, ahead):
    prefetch_l1(w + ahead)
    prefetch_l1(w + ahead + 64)
    return load_u8(w), load_u8(w + 64)


@inlined
def _fp8(w, part, tables, ahead):
    prefetch_l1(w + ahead)
    codes = load_u8(w)
    table = tables + _E4M3_AT
    low = lookup_128(load_u8(table), load_u8(table + 64), codes)
    high = lookup_128(load_u8(table + 128), load_u8(table + 192), codes)
    high = or_masked(high, codes, broadcast_u8(0x80))
    return interleave_low(low, high), interleave_high(low, high)


@inlined
def _int8(w, part, tables, ahead):
    prefetch_l1(w + ahead)
    fours = load_u8(w)
    magnitude = abs_i8(fours)
    table = tables + _INT8_AT
    low = lookup_128(load_u8(table), load_u8(table + 64), magnitude)
    high = lookup_128(load_u8(table + 128), load_u8(table + 192), magnitude)
    # The sign of zero does not matter, and a negative byte has bit 7 set.
    high = or_masked(high, fours, broadcast_u8(0x80))
    return _pair_rows(low, high)


@inlined
def _int4(w, part, tables, ahead):
    return _nibble_rows(w, part, tables + _INT4_AT, ahead)


@inlined
def _mxfp4(w, part, tables, ahead):
    return _nibble_rows(w, part, tables + _MXFP4_AT, ahead)


@inlined
def _nibble_rows(w, part, table, ahead):
    both = load_u8(w)
    if part == 0:
        prefetch_l1(w + ahead)
        codes = low_nibbles(both)
    else:
        codes = high_nibbles(both)
    low = lookup_16(load_u8(table), codes)
    high = lookup_16(load_u8(table + 64), codes)
    return _pair_rows(low, high)


@inlined
def _pair_rows(low, high):
    """Bytes of a row of fours -> its two pair-rows."""
    a, b = interleave_low(low, high), interleave_high(low, high)
    return even_dwords(a, b), odd_dwords(a, b)


READERS = {
    "bf16": Reader(_bf16, 128, 1, 32, 0, False),
    "fp8": Reader(_fp8, 64, 1, 32, 128, False),
    "int8": Reader(_int8, 64, 1, 64, 128, True),
    "int4": Reader(_int4, 64, 2, 64, 32, True),
    "mxfp4": Reader(_mxfp4, 64, 2, 64, 32, True),
    "int4-g128": Reader(_int4, 64, 2, 64, 128, True),
}
"""By format name."""
