"""Machine code of AVX-512: accumulators that live in registers, prefetches that are spread."""

from __future__ import annotations

import re

import pytest
from numba import types

from pykernels.cpu.gemm import avx512_passes, fma_avx512
from pykernels.cpu.gemv import avx512
from pykernels.quant import FORMATS

from ..kernels import needs_avx512, needs_bf16, operations, variant

_SUMS = [(name, "bf16", r"vfmadd\d+ps" if name == "f16" else "vdpbf16ps") for name in FORMATS] + [
    (name, "int8", "vpdpbusd") for name in ("int8", "int4", "q4_k", "q5_k", "q6_k")
]
_BOTH_HALVES = [("bf16", "bf16"), ("int8", "bf16"), ("int8", "int8")]
"""Whose tiles of four tokens read both halves of a block in one pass."""


@needs_bf16
@pytest.mark.parametrize(
    ("name", "activations", "product", "M"),
    [
        variant("avx512", *sums[:2], *sums, M, id=f"{'-'.join(sums[:2])}-{M}")
        for sums in _SUMS
        for M in ((1, 4, 8) if sums[:2] in _BOTH_HALVES else (1, 8))
    ],
)
def test_accumulators_of_tiles(name, activations, product, M):
    """A register array that LLVM leaves in memory costs a load and a store for each dot product.

    (The scheduler may spill dequantized rows, which costs nothing measurable.)
    """
    _check_sums(_assembly_of_tile(name, M, activations), product, M)


@needs_bf16
def test_prefetches_are_spread_over_an_unrolled_block():
    """More misses requested at once than a core keeps track of halve the speed of reading."""
    assembly = _assembly_of_tile("int8", 1, "int8")
    prefetches = [part.count("prefetcht0") for part in assembly.split("vpdpbusd")]
    assert sum(prefetches) >= 16
    assert max(prefetches) <= 16, "the prefetches of several packed tiles stand together"


@needs_bf16
@pytest.mark.parametrize(
    ("T", "scale_k", "minima", "act_k", "biased"),
    [
        (12, 0, False, 0, False),  # bf16
        (6, 16, False, 0, False),  # q6_k
        (6, 16, False, 256, True),  # the same with int8 activations
        (6, 32, True, 256, False),  # q4_k with them
    ],
)
def test_accumulators_of_a_gemm_pass(T, scale_k, minima, act_k, biased):
    built = avx512_passes.make_pass(T, scale_k, minima, act_k, biased, operations())
    _check_sums(_assembly(built._library), "vpdpbusd" if act_k else "vdpbf16ps", 2 * T)


@needs_avx512
@pytest.mark.parametrize("T", [4, 8, 12])
def test_accumulators_of_a_multiply_add_pass(T):
    assembly = _assembly(fma_avx512.make_pass(T)._library)
    assert len(re.findall(r"vfmadd\d+ps\s.*%zmm", assembly)) >= 4 * T
    assert not re.search(r"vmov\w+\s+%zmm\d+, -?\d*\(%r[sb]p", assembly), "a sum is spilled"


def _assembly_of_tile(name: str, M: int, activations: str) -> str:
    tile = avx512.make_tile(name, M, operations(), activations)
    tile.compile((types.int64,) * 9)  # as those that call it do: the cache goes by this
    (compiled,) = tile.overloads.values()
    return _assembly(compiled.library)


def _assembly(library) -> str:
    """From the bitcode that the cache keeps for what links it: Numba's own is of new code only."""
    return str(library._codegen._tm.emit_assembly(library._get_module_for_linking()))


def _check_sums(assembly: str, product: str, least: int) -> None:
    """At least so many dot products, and few whose sum is stored next."""
    lines = assembly.splitlines()
    sums = [
        (i, m[1])
        for i, line in enumerate(lines)
        if (m := re.search(rf"{product}.*, (%zmm\d+)", line))
    ]
    assert len(sums) >= least, f"the kernel does not use {product}"
    to_memory = re.compile(r"vmov\w+\s+(%zmm\d+), -?\d*\(%")
    stored = 0
    for i, register in sums:
        user = next((line for line in lines[i + 1 :] if f"{register}," in f"{line},"), "")
        stored += bool((m := to_memory.search(user)) and m[1] == register)
    assert stored <= len(sums) // 4, f"{stored} of {len(sums)} sums go to memory"
