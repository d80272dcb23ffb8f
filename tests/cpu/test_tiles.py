"""Single tiles: every E4M3 code, exact arithmetic, and registers that stay registers."""

from __future__ import annotations

import functools
import re

import pytest
import torch

from pykernels.cpu import tile_avx512, tile_generic
from pykernels.cpu.decode import TABLES
from pykernels.cpu.instructions import instructions
from pykernels.cpu.intrin.sync import call_routine
from pykernels.cpu.jit import kernel
from pykernels.cpu.rows import row_bytes
from pykernels.env import env
from pykernels.quant import Weight, get_format
from pykernels.registry import FORMATS, resolve
from pykernels.target import detect
from pykernels.testing import poisoned

FINITE = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F], dtype=torch.uint8)


def _lacks(*features: str) -> bool:
    return bool(detect().lacks(("avx512f", "avx512bw", *features)))


needs_avx512 = pytest.mark.skipif(_lacks(), reason="this CPU has no AVX-512")
needs_bf16 = pytest.mark.skipif(_lacks("avx512bf16"), reason="this CPU has no AVX512-BF16")
NEWER = frozenset({"avx512bf16", "avx512vbmi", "avx512vnni"})
"""Extensions that the base set spells out."""


def _operations(base: bool):
    with env.override(isa=NEWER if base else frozenset()):
        return instructions(detect())


def _tiles(which: str, fmt: str):
    """Address of the tiles of "avx512", the same without newer extensions, or "generic"."""
    if which == "generic":
        return tile_generic.make_tiles(fmt, "bf16").address
    return tile_avx512.make_tiles(fmt, _operations(which == "base"), "bf16").address


KINDS = [
    pytest.param("avx512", marks=needs_avx512),
    pytest.param("base", marks=needs_avx512),
    "generic",
]


@kernel("test-tiles")
def _call_twice(tiles, M, w, scale, split, k_blocks, K, rows, tables, out):
    call_routine(tiles, (M, w, scale, 0, split, K, rows, tables, 4096, out))
    call_routine(tiles, (M, w, scale, split, k_blocks, K, rows, tables, 4096, out))


@pytest.fixture(scope="module")
def run_tile():
    """(which, fmt, weight, x [M, K]) -> float32 [M, 32]."""
    tiles = functools.cache(_tiles)

    def run(which: str, name: str, weight: Weight, x: torch.Tensor) -> torch.Tensor:
        fmt, (M, K) = get_format(name), x.shape
        raw = torch.zeros(fmt.block_bytes(K) + 64, dtype=torch.uint8)
        skip = -raw.data_ptr() % 64
        blocks = raw[skip : skip + fmt.block_bytes(K)].view(1, -1)
        scales = torch.zeros(1, fmt.scale_bytes(K), dtype=torch.uint8)
        fmt.pack(weight, blocks, scales)
        inputs = torch.zeros(M, row_bytes(K), dtype=torch.uint8)
        inputs[:, : 2 * K] = x.contiguous().view(torch.uint8)
        out = poisoned(8, 32)
        rows = torch.tensor([inputs[min(t, M - 1)].data_ptr() for t in range(8)])
        _call_twice(
            tiles(which, name), M, blocks.data_ptr(), scales.data_ptr(), (K // 128 + 1) // 2,
            K // 128, K, rows.data_ptr(), TABLES.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        return out[:M]

    return run


@pytest.mark.parametrize("which", KINDS)
def test_all_254_finite_codes_are_exact(run_tile, which):
    """One-hot inputs read single weights back: subnormals, both zeros and both signs included."""
    codes = FINITE.repeat(17)[: 32 * 128].view(32, 128).clone()
    assert set(codes.flatten().tolist()) == set(FINITE.tolist())
    weight = Weight(codes.view(torch.float8_e4m3fn), torch.ones(1, 1))
    eye = torch.eye(128).to(torch.bfloat16)
    seen = torch.cat([run_tile(which, "fp8", weight, eye[k : k + 8]) for k in range(0, 128, 8)])
    assert torch.equal(seen.T, weight.data.float())


@pytest.mark.parametrize("which", KINDS)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("M", range(1, 9))
def test_small_integers_are_summed_exactly(run_tile, which, name, M):
    """No rounding can happen here, so every byte of the layout and every M must be right."""
    g = torch.Generator().manual_seed(M)
    fmt = get_format(name)
    shape = fmt.scale_shape(32, 384) or (1, 1)
    power = torch.randint(-2, 3, shape, generator=g)
    if name == "mxfp4":
        data = torch.randint(0, 16, (32, 384), generator=g, dtype=torch.uint8)
        scale = (power + 127).to(torch.uint8)
    else:
        data = torch.randint(-8, 8, (32, 384), generator=g).to(fmt.dtype)
        scale = (2.0**power).to(torch.bfloat16 if fmt.dtype == torch.int8 else torch.float32)
    scale = scale if fmt.scale_shape(32, 384) else None
    weight = Weight(data, scale)
    x = torch.randint(-4, 5, (M, 384), generator=g).to(torch.bfloat16)
    truth = x.double() @ fmt.dequantize(weight).double().T
    assert torch.equal(run_tile(which, name, weight, x).double(), truth)


@needs_avx512
@pytest.mark.parametrize("base", [False, True])
def test_silu_is_within_bf16_rounding(base):
    silu_mul_row = tile_avx512.make_silu_mul_row(_operations(base))

    @kernel(f"test-silu-{base}")
    def call(gate, up, h):
        silu_mul_row(gate, up, h)

    corners = torch.tensor([0.0, -0.0, 1e-30, 3e38] * 8)
    grid = torch.cat([torch.linspace(-110, 110, 3200), corners])
    gate = grid.view(-1, 32).contiguous()
    out = torch.empty(gate.shape, dtype=torch.bfloat16)
    ones = torch.ones(32)
    for i in range(len(gate)):
        call(gate[i].data_ptr(), ones.data_ptr(), out[i].data_ptr())
    truth = torch.nn.functional.silu(gate.double())
    error = (out.double() - truth).abs()
    tiny = 3e-37  # below -88.7 exp(-gate) overflows float32 and the result is -0, as torch's is
    assert (error <= truth.abs() * 2.0**-8 * 1.0001 + tiny).all()


@needs_bf16
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("M", [1, 2, 4, 8])
def test_accumulators_live_in_registers(name, M, tmp_path):
    """A register array that LLVM leaves on the stack costs a load and a store for each dot product.

    (The scheduler may spill a few decoded rows, which costs nothing measurable.)
    """
    with env.override(cache_dir=tmp_path):  # code that comes from the cache has no assembly
        tile = tile_avx512.make_tile(name, M, instructions(detect()), "bf16")
        tile.compile("(" + ", ".join(["int64"] * 9) + ")")
    (assembly,) = tile.inspect_asm().values()
    dots = len(re.findall("vdpbf16ps", assembly))
    on_stack = re.findall(r"%zmm\d+, -?\d*\(%r[sb]p|\(%r[sb]p\), %zmm", assembly)
    assert dots >= 2 * M, "the kernel does not use vdpbf16ps"
    assert len(on_stack) < dots, f"{len(on_stack)} stack accesses beside {dots} dot products"


def test_the_generic_kernel_is_chosen_without_avx512():
    with env.override(isa=frozenset({"avx512bw"})):
        assert resolve("auto", "fp8", detect()).name == "generic"
