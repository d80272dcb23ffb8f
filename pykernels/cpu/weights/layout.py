"""A format's packed tiles and scale groups as numbers, and the prefetch of what is read next."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

from ...quant.layout import K_BLOCK
from ..intrin.prefetch import prefetch_l1
from ..jit import inlined

AHEAD = 4096
"""Bytes that the prefetch of a stream runs ahead of its loads: one page."""

AHEAD_L1, AHEAD_L2 = 1024, 8192
"""The same of a stream that is prefetched to the first and to the second level.

The second level's span the latency of memory and need no buffer of the first, of which a core has
few; the first level's then span only that of the second."""

LOADS = 8
"""Loads of a tile."""


@dataclass(frozen=True)
class Packing:
    """How a format lies in a tile of 16 outputs, as numbers.

    Attributes:
        k_step: inputs of a tile: 32 in pairs, 64 in fours.
        tile_bytes: of a packed tile.
        parts: vectors of 16 outputs by 4 inputs that share a load; a tile has 8 loads.
    """

    k_step: int
    tile_bytes: int
    parts: int

    @property
    def fours(self) -> bool:
        return self.k_step == 64

    @property
    def prefetch_loads(self) -> int:
        """Loads that are prefetched together, as their share of the tile is whole cache lines: 1,
        but for masks beside codes."""
        return LOADS // math.gcd(LOADS, self.tile_bytes // 64)


_PAIRS16, _PAIRS8 = Packing(32, 1024, 1), Packing(32, 512, 1)
_FOURS8, _FOURS4 = Packing(64, 1024, 2), Packing(64, 512, 2)
_FOURS5, _FOURS6 = Packing(64, 640, 2), Packing(64, 768, 2)
_FOURS2, _FOURS3 = Packing(64, 256, 2), Packing(64, 384, 2)

TERNARY = ("tq1_0", "tq2_0", "q2_0", "q1_0")
"""Formats of 2-bit codes from -1 on."""

PACKINGS = {
    "bf16": _PAIRS16,
    "f16": _PAIRS16,
    "fp8": _PAIRS8,
    "fp8-channel": _PAIRS8,
    "int8": _FOURS8,
    "int8-channel": _FOURS8,
    "int4": _FOURS4,
    "int4-g128": _FOURS4,
    "int4-channel": _FOURS4,
    "int4-zp": _FOURS4,
    "int4-zp-g128": _FOURS4,
    "mxfp4": _FOURS4,
    "nvfp4": _FOURS4,
    "q4_k": _FOURS4,
    "q5_k": _FOURS5,
    "q6_k": _FOURS6,
    "q3_k": _FOURS3,
    "q2_k": _FOURS2,
    "q8_0": _FOURS8,
    "q4_0": _FOURS4,
    "q4_1": _FOURS4,
    "q5_0": _FOURS5,
    "q5_1": _FOURS5,
    "iq4_nl": _FOURS4,
    "iq4_xs": _FOURS4,
    "iq3_s": _FOURS4,
    "iq3_xxs": _FOURS4,
    "iq2_s": _FOURS3,
    "iq2_xs": _FOURS3,
    "iq2_xxs": _FOURS3,
    "iq1_s": _FOURS2,
    "iq1_m": _FOURS3,
    **dict.fromkeys(TERNARY, _FOURS2),
}
"""By format name."""


BIASES = {
    **dict.fromkeys(("int8", "int8-channel", "q8_0", "iq4_nl", "iq4_xs"), 128),
    **dict.fromkeys(("int4", "int4-g128", "int4-channel", "q4_0"), 8),
    **dict.fromkeys(("mxfp4", "nvfp4"), 12),
    "iq3_s": 15,
    "iq3_xxs": 31,
    **dict.fromkeys(("iq2_s", "iq2_xs", "iq2_xxs"), 43),
    "iq1_m": 9,
    **dict.fromkeys(TERNARY, 1),
    "q5_0": 16,
    "q6_k": 32,
    "q3_k": 4,
}
"""By format name, see ``dequant.Reader.codes``; 0 for the others."""

UNITS = {"mxfp4": 0.5}
"""By format name, see ``dequant.Reader.codes``; 1 for the others."""

CODE_BITS = {
    **dict.fromkeys(("int4", "int4-g128", "int4-channel", "q4_0"), 4),
    **dict.fromkeys(("int4-zp", "int4-zp-g128", "q4_k", "q4_1"), 4),
    **dict.fromkeys(("q5_k", "q5_0", "q5_1"), 5),
    "q6_k": 6,
    # At the place of wider ones, which shifts of bytes reach.
    **dict.fromkeys(("q3_k", "q2_k", "iq1_s", *TERNARY), 5),
}
"""Formats of integer codes narrow enough for a magic number, and bits of a code there."""

INTEGERS = frozenset(BIASES) | frozenset(CODE_BITS)
"""Formats whose weights are integers of 8 bits, in their unit."""

MAGIC_OFFSETS = {fmt: (1 << bits) + BIASES.get(fmt, 0) for fmt, bits in CODE_BITS.items()}
"""By format name, see ``dequant.Reader.magic_offset``."""


SCALE_K = {
    **dict.fromkeys(("bf16", "f16"), 0),
    **dict.fromkeys(("fp8", "fp8-channel", "int8", "int8-channel"), 128),
    **dict.fromkeys(("tq1_0", "tq2_0", "q1_0"), 128),
    **dict.fromkeys(("int4-g128", "int4-channel", "int4-zp-g128"), 128),
    **dict.fromkeys(("int4", "int4-zp", "mxfp4", "q4_k", "q5_k", "q8_0"), 32),
    **dict.fromkeys(("q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl", "iq4_xs"), 32),
    **dict.fromkeys(("iq3_s", "iq3_xxs", "iq2_xxs", "iq1_s", "q2_0"), 32),
    **dict.fromkeys(("q6_k", "q3_k", "q2_k", "iq2_s", "iq2_xs", "iq1_m", "nvfp4"), 16),
}
"""Inputs of a scale group by format name; 0 for no scales."""

MINIMA = frozenset(("int4-zp", "int4-zp-g128", "q4_k", "q5_k", "q2_k", "q4_1", "q5_1", "iq1_s"))
"""Formats whose groups have a minimum beside the scale."""

WIDE = frozenset(("f16",))
"""Formats whose weights a bfloat16 would round: they are multiplied as float32."""


@dataclass(frozen=True)
class Superblock:
    """Packed scales of 32 outputs by 256 inputs: the outputs' halves, then the groups' bytes.

    Attributes:
        shift: binary logarithm of the number of groups.
        minima: whether halves and bytes of the scales are followed by those of the minima; the
            bytes are unsigned then, else signed.
        unit: what the halves are multiplied by: a power of two.
        nibbles: whether a byte holds a group's scale in its low half, its minimum in the high one.
    """

    shift: int
    minima: bool
    unit: float = 1.0
    nibbles: bool = False

    @property
    def first(self) -> int:
        """Bytes before those of the first group."""
        return 128 if self.minima else 64

    @property
    def step(self) -> int:
        """Bytes of a group."""
        return 64 if self.minima and not self.nibbles else 32

    @property
    def nbytes(self) -> int:
        return self.first + (self.step << self.shift)


SUPERBLOCKS = {
    **dict.fromkeys(("q4_k", "q5_k"), Superblock(3, minima=True)),
    **dict.fromkeys(("q6_k", "q3_k"), Superblock(4, minima=False)),
    "q2_k": Superblock(4, minima=True, nibbles=True),
    **dict.fromkeys(("iq4_xs", "iq3_s"), Superblock(3, minima=False)),
    "iq3_xxs": Superblock(3, minima=False, unit=0.5),
    **dict.fromkeys(("iq2_s", "iq2_xs"), Superblock(4, minima=False, unit=1 / 8)),
    "iq2_xxs": Superblock(3, minima=False, unit=1 / 8),
    "iq1_s": Superblock(3, minima=True, unit=1 / 8),
    "iq1_m": Superblock(4, minima=False, unit=1 / 8),
}
"""By format name; the others have no superblocks."""

GROUP_ZERO, GROUP_HALVES, SUPER_NVFP4 = 96, 128, 640
"""Packed scale bytes of 32 outputs by a group: with zero points of a byte, and of ``q4_1`` and
``q5_1``; by 16 groups of ``nvfp4``, float32 [32] first."""


def packed_bytes(fmt: str) -> int:
    """Packed bytes of 32 outputs by 128 inputs, without their scales."""
    packing = PACKINGS[fmt]
    return 2 * K_BLOCK // packing.k_step * packing.tile_bytes


@functools.cache
def make_prefetch(packing: Packing, prefetch: Callable = prefetch_l1) -> Callable:
    """``prefetch_tile(tile, load)`` prefetches the lines of ``packing.prefetch_loads`` loads, the
    first a multiple of them, in the order of their bytes, as hardware prefetchers follow them."""
    EACH = packing.tile_bytes // LOADS
    LINES = packing.prefetch_loads * EACH // 64

    @inlined
    def prefetch_tile(tile, load):
        for line in range(LINES):
            prefetch(tile + EACH * load + 64 * line)

    return prefetch_tile
