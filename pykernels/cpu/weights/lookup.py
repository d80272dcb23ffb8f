"""The tables that packed codes are looked up in, for dequantization in registers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...quant import mxfp4
from ...quant.gguf import iq1, iq2, iq3, iq4_nl
from .layout import BIASES, UNITS

E4M3_AT, INT8_AT, INT4_AT, MXFP4_AT, Q4_AT, Q5_AT, Q6_AT = 0, 256, 512, 640, 768, 896, 1024
INT4_WORDS, MXFP4_WORDS, Q4_WORDS, Q5_WORDS = 1152, 1216, 1280, 1344
PLANE_WORDS, EVEN_AT, MXFP4_CODES, MXFP4_SIGNED = 1408, 1536, 1600, 1664
BIT4_AT = 1728
Q5_0_AT, IQ4_NL_AT, Q5_0_WORDS, IQ4_NL_WORDS, IQ4_NL_CODES, IQ4_NL_SIGNED = (
    1792,
    1920,
    2048,
    2112,
    2176,
    2240,
)
BIT2_AT, Q3_AT, Q3_WORDS, TWOS_AT, TWOS_WORDS = 2304, 2368, 2496, 2560, 2688
"""Where a table begins in ``TABLES``, in bytes."""

_VALUES = {
    "iq3_s": iq3.IQ3_S_VALUES,
    "iq3_xxs": iq3.IQ3_XXS_VALUES,
    "iq2_s": iq2.VALUES,
    "iq1_m": iq1.VALUES,
    "nvfp4": 2 * mxfp4.VALUES,
}
"""By name, the integers of codes of 4 bits (or of 3, each twice)."""

OF_CODES = {name: 2752 + 256 * i for i, name in enumerate(_VALUES)}
"""Where these begin: their bytes, their words, and the codes with their format's bias."""

WORDS_FROM, CODES_FROM = 128, 192
"""Where words and biased codes begin, behind the bytes."""


def _make_tables() -> torch.Tensor:
    """uint8 at a 64-byte-aligned address: low bytes, then high bytes, of bf16(code).

    E4M3 and magnitudes 0 .. 127 have 128 entries each; 4-bit codes have 16, once for each 128-bit
    lane; 5- and 6-bit codes have 64. Tables of whole words follow: 32 entries for codes of 4 bits
    (each twice; +0 for -0) and 5; ``128 (1 - h)`` for signed h of 6 bits (``gemm.dequant_slab``).
    Then a mask of even bytes, MXFP4's codes as integers, and the bit 4; then the same of signed
    codes of 5 bits and of IQ4_NL: bytes, words, integers; the bit 2 and signed codes of 3 bits, and
    codes of 2 bits less 1.
    Last, ``OF_CODES``.
    """

    def bytes_of(values: torch.Tensor, copies: int = 1) -> torch.Tensor:
        return values.to(torch.bfloat16).view(torch.uint8).view(-1, 2).T.repeat(1, copies).flatten()

    def words_of(values: torch.Tensor) -> torch.Tensor:
        return values.to(torch.bfloat16).repeat(32 // min(32, len(values))).view(torch.uint8)

    codes = _integers(range(128), torch.uint8)
    int4 = _integers([*range(8), *range(-8, 0)])
    e4m3 = codes.view(torch.float8_e4m3fn)
    parts = (
        (e4m3, 1),
        (codes, 1),
        (int4, 4),
        (mxfp4.VALUES, 4),
        (_integers(range(16)), 4),
        (_integers(range(32)), 2),
        (_integers(range(-32, 32)), 1),
    )
    high_plane = 128 - 128 * _integers([*range(32), *range(-32, 0)])
    words = int4, mxfp4.VALUES + 0, _integers(range(16)), _integers(range(32)), high_plane
    even = _integers([255, 0], torch.uint8).repeat(32)
    signed = (mxfp4.VALUES / UNITS["mxfp4"]).to(torch.int8).repeat(4)
    integers = (signed + BIASES["mxfp4"]).view(torch.uint8)
    tables = [*(bytes_of(*part) for part in parts), *map(words_of, words), even, integers]
    bit4 = _integers([16] * 64, torch.uint8)
    tables += [signed.view(torch.uint8), bit4]
    fives = _integers(range(-16, 16))
    tables += [bytes_of(fives, 2), bytes_of(iq4_nl.VALUES, 4)]
    tables += [words_of(fives), words_of(iq4_nl.VALUES)]
    signed = iq4_nl.VALUES.to(torch.int16).repeat(4)
    tables += [(signed + BIASES["iq4_nl"]).to(torch.uint8), signed.to(torch.int8).view(torch.uint8)]
    threes = _integers([*range(-4, 4)] * 2)
    tables += [_integers([4] * 64, torch.uint8), bytes_of(threes, 4), words_of(threes)]
    twos = _integers([*range(-1, 3)] * 4)
    tables += [bytes_of(twos, 4), words_of(twos)]
    for name, values in _VALUES.items():
        biased = (values + BIASES[name]).to(torch.uint8).repeat(64 // len(values))
        tables += [bytes_of(values, 64 // len(values)), words_of(values), biased]
    return _aligned(torch.cat(tables))


def _integers(values: Sequence[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device="cpu")


def _aligned(tables: torch.Tensor) -> torch.Tensor:
    raw = torch.empty(len(tables) + 64, dtype=torch.uint8, device="cpu")
    skip = -raw.data_ptr() % 64
    aligned = raw[skip : skip + len(tables)]
    aligned.copy_(tables)
    return aligned


TABLES = _make_tables()
"""Passed to the readers by address, so that compiled kernels hold no pointer of this process."""
