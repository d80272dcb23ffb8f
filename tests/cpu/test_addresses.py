"""A store through an integer address is one, wherever it is inlined."""

from __future__ import annotations

import pytest
import torch

from pykernels.cpu.intrin.avx512 import add_f32, load_f32, store_f32
from pykernels.cpu.intrin.registers import f32x16_array
from pykernels.cpu.jit import inlined, routine
from pykernels.target import detect

ROWS = 4


@pytest.mark.skipif(bool(detect().lacks(("avx512f",))), reason="registers of AVX-512")
def test_stores_of_a_helper_are_not_taken_for_stores_to_null():
    """Its code generator writes ``to`` as an offset from null where row 0 is stored."""

    @inlined
    def doubled(out, half, times):
        to = out + 64 * half
        totals = f32x16_array(ROWS)
        for t in range(ROWS):
            totals[t] = load_f32(to + 128 * t)
        for _ in range(times):
            for t in range(ROWS):
                totals[t] = add_f32(totals[t], totals[t])
        for t in range(ROWS):
            store_f32(to + 128 * t, totals[t])

    @routine(2, "both-halves")
    def both_halves(out, times):
        for half in range(2):
            doubled(out, half, times)
        return 0

    out = torch.ones(ROWS, 32)
    both_halves.ctypes(out.data_ptr(), 3)
    assert torch.equal(out, torch.full((ROWS, 32), 8.0))
