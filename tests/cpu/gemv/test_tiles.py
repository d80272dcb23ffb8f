"""Single tiles: every E4M3 code, exact arithmetic, a token's sums in any batch."""

from __future__ import annotations

import functools

import pytest
import torch

from pykernels.cpu.activations.row_layout import row_format
from pykernels.cpu.backends.amx import batch_invariant_to
from pykernels.cpu.gemv import amx, avx2, avx512, common, portable
from pykernels.cpu.intrin import amx_model
from pykernels.cpu.intrin.sync import call_routine
from pykernels.cpu.jit import kernel
from pykernels.cpu.weights.lookup import TABLES
from pykernels.quant import FORMATS, Format, Weight, get_format
from pykernels.quant.gguf import GGUF
from pykernels.quant.integer import Integer
from pykernels.quant.zero_point import ZeroPoint
from pykernels.testing import assert_close, poisoned

from ..activations.test_quantize import quantized
from ..kernels import (
    SIBLINGS,
    lacks,
    needs_avx2,
    needs_avx512,
    needs_vnni,
    operations,
    variant,
)

FINITE = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F], dtype=torch.uint8)


@functools.cache
def _tiles(which: str, fmt: str, activations: str):
    """Address of the tiles of "avx512", the same without newer extensions, those of the AMX
    backend on modelled tiles, of "avx2", or "generic"."""
    if which == "generic":
        return portable.make_tiles(fmt, activations).address
    if which == "avx2":
        return avx2.make_tiles(fmt, activations).address
    ops = operations(which == "base")
    if which == "modelled amx" and activations == "bf16":
        return amx.make_tiles(fmt, ops, amx_model).address
    return avx512.make_tiles(fmt, ops, activations).address


NEEDS = {
    "avx512": needs_avx512,
    "base": needs_avx512,
    "modelled amx": needs_vnni,
    "avx2": needs_avx2,
    "generic": (),
}

EXACT = {"avx512": "magic", "base": "magic", "modelled amx": "int8_slices", "generic": "bf16"}
"""How integer weights meet bf16 activations."""


@functools.cache
def _tile_of_one_token(fmt: str):
    """Address of tiles of which only that of one token may be called; and their unit."""
    if lacks():
        unit, tile = "avx2", avx2.make_tile(fmt, avx2.tile_row_format(fmt, "bf16"), 1, False)
    else:
        unit, tile = "avx512", avx512.make_tile(fmt, 1, operations(), "bf16")
    return common.by_tokens(dict.fromkeys((1, 2, 4, 8), tile), f"{fmt}-{unit}-one").address, unit


@kernel("test-tiles")
def _call_twice(tiles, M, w, scale, split, k_blocks, K, rows, tables, out):
    call_routine(tiles, (M, w, w, scale, 0, split, K, rows, tables, out))
    call_routine(tiles, (M, w, w, scale, split, k_blocks, K, rows, tables, out))


def run_tile(
    which: str,
    name: str,
    weight: Weight,
    x: torch.Tensor,
    activations: str = "bf16",
    address: int | None = None,
) -> torch.Tensor:
    """x [M, K] times a block of 32 outputs, in two steps -> float32 [M, 32].

    Args:
        address: of the tiles; None: those of ``which``.
    """
    fmt, (M, K) = get_format(name), x.shape
    raw = torch.zeros(fmt.block_bytes(K) + 64, dtype=torch.uint8)
    skip = -raw.data_ptr() % 64
    blocks = raw[skip : skip + fmt.block_bytes(K)].view(1, -1)
    scales = torch.zeros(1, fmt.scale_bytes(K), dtype=torch.uint8)
    fmt.pack(weight, blocks, scales)
    if which == "avx2":
        how = avx2.tile_row_format(name, activations)
    else:
        how = row_format(name, activations, EXACT[which])
    inputs = quantized(how, x, which if which in ("avx2", "generic") else "avx512")
    out = poisoned(8, 32)
    rows = torch.tensor([inputs[min(t, M - 1)].data_ptr() for t in range(8)])
    _call_twice(
        address or _tiles(which, name, activations),
        M,
        blocks.data_ptr(),
        scales.data_ptr(),
        (K // 128 + 1) // 2,
        K // 128,
        K,
        rows.data_ptr(),
        TABLES.data_ptr(),
        out.data_ptr(),
    )
    return out[:M]


@pytest.mark.parametrize("which", [pytest.param(kind, marks=n) for kind, n in NEEDS.items()])
def test_all_254_finite_e4m3_codes_are_exact(which):
    """One-hot inputs read single weights back: subnormals, both zeros and both signs included."""
    codes = FINITE.repeat(17)[: 32 * 128].view(32, 128).clone()
    assert set(codes.flatten().tolist()) == set(FINITE.tolist())
    weight = Weight(codes.view(torch.float8_e4m3fn), torch.ones(1, 1))
    eye = torch.eye(128).to(torch.bfloat16)
    seen = torch.cat([run_tile(which, "fp8", weight, eye[k : k + 8]) for k in range(0, 128, 8)])
    assert torch.equal(seen.T, weight.data.float())


def _small_integers(fmt: Format, N: int, K: int, g: torch.Generator) -> Weight:
    """Random codes, all of them where they are few, and scales that are powers of two."""
    if isinstance(fmt, GGUF):
        raw = torch.randint(0, 256, fmt.data_shape(N, K), generator=g, dtype=torch.uint8)
        blocks = fmt.split(raw.view(-1, fmt.stored_bytes))
        codes = blocks.codes
        if fmt.name == "q8_0":  # which has no -128
            codes = torch.where(codes == 128, 129, codes)
        halves = torch.full_like(blocks.halves, 0.25)
        return Weight(fmt.join(blocks._replace(halves=halves, codes=codes)).view(raw.shape))
    shape = fmt.scale_shape(N, K)
    power = torch.randint(-2, 3, shape or (1,), generator=g)
    if isinstance(fmt, ZeroPoint):
        data = torch.randint(0, 16, (N, K), generator=g, dtype=torch.uint8)
        scale = 2.0**power
        scale[:, 1::2] = torch.randint(0, 17, (N, scale.shape[1] // 2), generator=g)
        return Weight(data, scale.half())
    if fmt.name == "nvfp4":
        data = torch.randint(0, 16, (N, K), generator=g, dtype=torch.uint8)
        power = torch.randint(-2, 3, (N, K // 16), generator=g)
        return fmt.join(data, (2.0**power).to(torch.float8_e4m3fn), torch.tensor(0.5))
    if fmt.name == "mxfp4":
        data = torch.randint(0, 16, (N, K), generator=g, dtype=torch.uint8)
        return Weight(data, (power + 127).to(torch.uint8))
    low, high = (fmt.low, fmt.high) if isinstance(fmt, Integer) else (-8, 7)
    data = torch.randint(low, high + 1, (N, K), generator=g).to(fmt.dtype)
    return Weight(data, (2.0**power).to(fmt.scale_dtypes[0]) if shape else None)


def _tiles_of(names, activations="bf16"):
    return [
        variant(kind, name, activations, marks=needs)
        for name in names
        for kind, needs in NEEDS.items()
    ]


@pytest.mark.parametrize(("which", "name"), _tiles_of(FORMATS))
def test_sums_of_small_integers_are_exact(which, name):
    """No rounding can happen here, so every byte of the layout and every M must be right."""
    g = torch.Generator().manual_seed(1)
    fmt, K = get_format(name), 768
    weight = _small_integers(fmt, 32, K, g)
    x = torch.randint(-4, 5, (8, K), generator=g).to(torch.bfloat16)
    truth = x.double() @ fmt.dequantize(weight).double().T
    for M in range(1, 9):
        assert torch.equal(run_tile(which, name, weight, x[:M]).double(), truth[:M]), f"{M} tokens"


@needs_avx2
@pytest.mark.parametrize("name", SIBLINGS)
def test_the_tile_of_one_token_of_a_sibling_is_exact(name):
    address, unit = _tile_of_one_token(name)
    g = torch.Generator().manual_seed(1)
    fmt, K = get_format(name), 768
    weight = _small_integers(fmt, 32, K, g)
    x = torch.randint(-4, 5, (1, K), generator=g).to(torch.bfloat16)
    truth = x.double() @ fmt.dequantize(weight).double().T
    assert torch.equal(run_tile(unit, name, weight, x, address=address).double(), truth)


@pytest.mark.parametrize(("which", "name"), _tiles_of(["fp8", "int8", "mxfp4", "q4_k", "q2_k"]))
def test_a_token_does_not_depend_on_its_batch(which, name):
    """Bit for bit; but in AMX tiles bf16 products of one token are summed in another order.

    Some tokens have inputs of four slices, and make those that share a pass be multiplied so.
    """
    g = torch.Generator().manual_seed(6)
    fmt, K = get_format(name), 768
    weight, x = fmt.quantize(torch.randn(32, K, generator=g)), torch.randn(8, K, generator=g)
    x[1::3] *= 10.0 ** (8 * torch.rand(K, generator=g) - 4)
    x = x.to(torch.bfloat16)
    alone = torch.cat([run_tile(which, name, weight, x[t : t + 1]) for t in range(8)])
    whole = run_tile(which, name, weight, x)
    most = batch_invariant_to(name, "bf16") if which == "modelled amx" else None
    for M in range(1, 9):
        expected = alone if most is None or M <= most else whole
        assert torch.equal(run_tile(which, name, weight, x[:M]), expected[:M]), M


@pytest.mark.parametrize(
    ("which", "name"), _tiles_of([f for f in FORMATS if FORMATS[f].int8_kind], "int8")
)
def test_int8_products_are_exact(which, name):
    """Inputs of -127 .. 127 with 127 in every group are their own codes: nothing is rounded."""
    g = torch.Generator().manual_seed(2)
    fmt, K = get_format(name), 768
    weight = _small_integers(fmt, 32, K, g)
    x = torch.randint(-127, 128, (8, K), generator=g)
    x[:, ::64] = -127
    x = x.to(torch.bfloat16)
    truth = x.double() @ fmt.dequantize(weight).double().T
    for M in range(1, 9):
        seen = run_tile(which, name, weight, x[:M], "int8")
        assert_close(seen, truth[:M], 3e-7, f"{M} tokens")


@pytest.mark.parametrize(
    ("which", "name"),
    [*_tiles_of(["int8", "mxfp4", "q4_k"]), variant("modelled amx", "q2_k", marks=needs_vnni)],
)
def test_wide_ranges_of_inputs(which, name):
    """Outliers of 1e5 among inputs of 1, and inputs from 1e-6 to 1e6: products are exact."""
    g = torch.Generator().manual_seed(5)
    fmt, K = get_format(name), 2048
    weight = fmt.quantize(torch.randn(32, K, generator=g))
    x = torch.randn(2, K, generator=g)
    x[0, ::100] *= 1e5
    x[1] *= 10.0 ** (12 * torch.rand(K, generator=g) - 6)
    x, w = x.to(torch.bfloat16), fmt.dequantize(weight).double()
    error = (run_tile(which, name, weight, x).double() - x.double() @ w.T).abs()
    assert (error <= 1e-6 * (x.double().abs() @ w.abs().T)).all()
