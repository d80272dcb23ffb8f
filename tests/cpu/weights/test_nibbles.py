"""Loads of halves of bytes, in both kinds of vectors, against a plain definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pykernels.cpu.intrin import avx2, avx512, avx512_bytes
from pykernels.cpu.jit import inlined, routine
from pykernels.cpu.weights import nibbles

from ..kernels import needs_avx2, needs_avx512

NUMBERS = {
    "low_as_f32": lambda a: (a & 15).astype(np.float32),
    "high_as_f32": lambda a: (a >> 4).astype(np.float32),
    "low_as_i32": lambda a: (a & 15).astype(np.int32),
    "low_as_word_pairs": lambda a: np.repeat((a & 15).astype(np.int16), 2),
}
"""name -> what it makes of bytes."""


@inlined
def _store_i32(to, value):
    avx512.store_f32(to, avx512_bytes.bits_as_f32(value))


def _stores(width: int) -> dict[str, Any]:
    """By what a name ends in."""
    if width == 8:
        return {"f32": avx2.store_f32, "i32": avx2.store_i32, "pairs": avx2.store_i32}
    return {"f32": avx512.store_f32, "i32": _store_i32, "pairs": avx512_bytes.store_u8}


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize(
    ("loads", "width"),
    [
        pytest.param(nibbles.OF_8, 8, marks=needs_avx2, id="avx2"),
        pytest.param(nibbles.OF_16, 16, marks=needs_avx512, id="avx512"),
    ],
)
def test_a_load_is_its_definition(loads: nibbles.Nibbles, width: int, name: str) -> None:
    op, keep = getattr(loads, name), _stores(width)[name.rpartition("_")[2]]

    @routine(2, f"{name}-{width}")
    def call(a, to):
        keep(to, op(a))
        return 0

    expected = NUMBERS[name](np.arange(256, dtype=np.uint8))
    raw = np.zeros(4 * 256 + 64, np.uint8)
    found = raw[-raw.ctypes.data % 64 :][: 4 * 256]
    taken = np.arange(257, dtype=np.uint8)[1:] - np.uint8(1)  # at an odd address
    for first in range(0, 256, width):
        call.ctypes(taken.ctypes.data + first, found.ctypes.data + 4 * first)
    assert found.tobytes() == expected.tobytes()
