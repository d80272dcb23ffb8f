"""Single tiles: every E4M3 code, exact arithmetic, and registers that stay registers."""

from __future__ import annotations

import functools
import re

import pytest
import torch
from numba import types

from pykernels.cpu.activations.int8_slices import MAGIC_BITS, SHORT, join_lowest, join_short
from pykernels.cpu.activations.quantize import make_quantize_row, row_format
from pykernels.cpu.activations.row_layout import (
    SLICES,
    SUM_UNIT,
    codes_at,
    lowest_at,
    offset_at,
    row_bytes,
    scale_at,
    slices_at,
    sum_at,
    unit_sum_at,
)
from pykernels.cpu.gemm import avx512_passes, fma
from pykernels.cpu.gemv import amx, avx512, portable
from pykernels.cpu.intrin import amx_model
from pykernels.cpu.intrin.avx512 import store_f32
from pykernels.cpu.intrin.avx512_bytes import add_i32, all_i32, load_i32
from pykernels.cpu.intrin.sync import call_routine
from pykernels.cpu.isa import instructions
from pykernels.cpu.jit import kernel
from pykernels.cpu.weights.lookup import TABLES
from pykernels.env import env
from pykernels.quant import FORMATS, Format, Weight, get_format
from pykernels.quant.activations import digits, quantize, sums
from pykernels.quant.gguf import GGUF
from pykernels.quant.integer import Integer, IntegerChannel
from pykernels.registry import resolve
from pykernels.target import detect
from pykernels.testing import assert_close, poisoned

FINITE = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F], dtype=torch.uint8)


def _lacks(*features: str) -> bool:
    return bool(detect().lacks(("avx512f", "avx512bw", *features)))


needs_avx512 = pytest.mark.skipif(_lacks(), reason="this CPU has no AVX-512")
needs_vnni = pytest.mark.skipif(_lacks("avx512vnni"), reason="this CPU has no AVX512-VNNI")
needs_bf16 = pytest.mark.skipif(_lacks("avx512bf16"), reason="this CPU has no AVX512-BF16")
NEWER = frozenset({"avx512bf16", "avx512vbmi", "avx512vnni", "gfni"})
"""Extensions that the base set spells out."""


def _operations(base: bool):
    with env.override(isa=NEWER if base else frozenset()):
        return instructions(detect())


@functools.cache
def _tiles(which: str, fmt: str, activations: str):
    """Address of the tiles of "avx512", the same without newer extensions, those of the AMX
    backend on modelled tiles, or "generic"."""
    if which == "generic":
        return portable.make_tiles(fmt, activations).address
    ops = _operations(which == "base")
    if which == "amx" and activations == "bf16":
        return amx.make_tiles(fmt, ops, amx_model).address
    return avx512.make_tiles(fmt, ops, activations).address


def _quantize_rows(which: str, fmt: str, activations: str, rows: torch.Tensor, K: int) -> None:
    if how := row_format(fmt, activations, EXACT[which]):
        routine = make_quantize_row(how, which == "generic").address
        for row in rows:
            _call_quantize_row(routine, row.data_ptr(), K)


@kernel("test-quantize_row")
def _call_quantize_row(routine, row, K):
    call_routine(routine, (row, K, 0, K))


NEEDS = {"avx512": needs_avx512, "base": needs_avx512, "amx": needs_vnni, "generic": ()}
KINDS = [pytest.param(kind, marks=needs) for kind, needs in NEEDS.items()]


EXACT = {"avx512": "magic", "base": "magic", "amx": "digits", "generic": "decoded"}
"""How integer weights meet bf16 activations."""


@kernel("test-tiles")
def _call_twice(tiles, M, w, scale, split, k_blocks, K, rows, tables, out):
    call_routine(tiles, (M, w, w, scale, 0, split, K, rows, tables, out))
    call_routine(tiles, (M, w, w, scale, split, k_blocks, K, rows, tables, out))


def run_tile(
    which: str, name: str, weight: Weight, x: torch.Tensor, activations: str = "bf16"
) -> torch.Tensor:
    """x [M, K] times a block of 32 outputs, in two steps -> float32 [M, 32]."""
    fmt, (M, K) = get_format(name), x.shape
    raw = torch.zeros(fmt.block_bytes(K) + 64, dtype=torch.uint8)
    skip = -raw.data_ptr() % 64
    blocks = raw[skip : skip + fmt.block_bytes(K)].view(1, -1)
    scales = torch.zeros(1, fmt.scale_bytes(K), dtype=torch.uint8)
    fmt.pack(weight, blocks, scales)
    how = row_format(name, activations, EXACT[which])
    inputs = torch.full((M, row_bytes(K, how)), 255, dtype=torch.uint8)
    inputs[:, : 2 * K] = x.contiguous().view(torch.uint8)
    _quantize_rows(which, name, activations, inputs, K)
    out = poisoned(8, 32)
    rows = torch.tensor([inputs[min(t, M - 1)].data_ptr() for t in range(8)])
    _call_twice(
        _tiles(which, name, activations), M, blocks.data_ptr(), scales.data_ptr(),
        (K // 128 + 1) // 2, K // 128, K, rows.data_ptr(), TABLES.data_ptr(), out.data_ptr(),
    )  # fmt: skip
    return out[:M]


@pytest.mark.parametrize("which", KINDS)
def test_all_254_finite_codes_are_exact(which):
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
    if fmt.name == "mxfp4":
        data = torch.randint(0, 16, (N, K), generator=g, dtype=torch.uint8)
        return Weight(data, (power + 127).to(torch.uint8))
    low, high = (fmt.low, fmt.high) if isinstance(fmt, Integer) else (-8, 7)
    data = torch.randint(low, high + 1, (N, K), generator=g).to(fmt.dtype)
    return Weight(data, (2.0**power).to(fmt.scale_dtypes[0]) if shape else None)


def _formats_of_kinds(names):
    """All pairs; but what the base set spells out for integers is tested with the scales of groups
    alone."""
    return [
        pytest.param(kind, name, marks=needs)
        for name in names
        for kind, needs in NEEDS.items()
        if kind != "base" or not isinstance(FORMATS[name], IntegerChannel)
    ]


@pytest.mark.parametrize(("which", "name"), _formats_of_kinds(FORMATS))
def test_small_integers_are_summed_exactly(which, name):
    """No rounding can happen here, so every byte of the layout and every M must be right."""
    g = torch.Generator().manual_seed(1)
    fmt, K = get_format(name), 768
    weight = _small_integers(fmt, 32, K, g)
    x = torch.randint(-4, 5, (8, K), generator=g).to(torch.bfloat16)
    truth = x.double() @ fmt.dequantize(weight).double().T
    for M in range(1, 9):
        assert torch.equal(run_tile(which, name, weight, x[:M]).double(), truth[:M]), f"{M} tokens"


@pytest.mark.parametrize("which", KINDS)
@pytest.mark.parametrize("name", ["fp8", "int8", "mxfp4", "q4_k"])
def test_a_tokens_sums_do_not_depend_on_its_batch(which, name):
    """Bit for bit; but in AMX tiles bf16 products of one token are summed in another order.

    Some tokens have inputs of four digits, and make those that share a pass be multiplied so.
    """
    g = torch.Generator().manual_seed(6)
    fmt, K = get_format(name), 768
    weight, x = fmt.quantize(torch.randn(32, K, generator=g)), torch.randn(8, K, generator=g)
    x[1::3] *= 10.0 ** (8 * torch.rand(K, generator=g) - 4)
    whole = run_tile(which, name, weight, x.to(torch.bfloat16))
    for M in range(amx.FROM[name] if which == "amx" and name == "fp8" else 1, 8):
        assert torch.equal(run_tile(which, name, weight, x[:M].to(torch.bfloat16)), whole[:M]), M


@pytest.mark.parametrize(
    ("which", "name"), _formats_of_kinds(name for name in FORMATS if FORMATS[name].int8_kind)
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


@pytest.mark.parametrize("which", KINDS)
@pytest.mark.parametrize("name", ["int8", "mxfp4", "q4_k"])
def test_wide_ranges_of_inputs_are_summed_as_exactly_as_float32_can(which, name):
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


@pytest.mark.parametrize("kind", ["avx512", "generic"])
@pytest.mark.parametrize("name", ["int4", "q4_k", "q6_k"])
def test_annotations_are_those_of_the_reference(kind, name):
    """Codes, scales and sums, bit for bit; also of zeros, tiny values and a NaN."""
    if kind == "avx512" and _lacks():
        pytest.skip("this CPU has no AVX-512")
    x = torch.randn(6, 512, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    x[1, :256] = 0
    x[2] *= 1e-38
    x[3, 7], x[3, 300] = 50.0, -50.0
    how, how_k = FORMATS[name].int8_kind, row_format(name, "int8")
    rows = torch.full((6, row_bytes(512, how_k)), 255, dtype=torch.uint8)
    rows[:, :1024] = x.view(torch.uint8)
    _quantize_rows(kind, name, "int8", rows, 512)
    truth = quantize(x, how)
    sum_k, groups = how_k.sum_k, 512 // how_k.act_k
    assert torch.equal(_part(rows, codes_at(0, 512), 512, torch.int8), truth.q)
    assert torch.equal(_part(rows, scale_at(0, 512, 0), groups), truth.scale)
    added = sums(truth.q, sum_k)
    if how_k.bias:
        seen = _part(rows, sum_at(0, 512, 0), 512 // sum_k, torch.int32)
        assert torch.equal(seen, -how_k.bias * added.int())
    else:
        seen = _part(rows, sum_at(0, 512, 0), 512 // sum_k)
        assert torch.equal(seen, added.float())
    x[5, 400] = float("nan")
    rows[:, :1024] = x.view(torch.uint8)
    _quantize_rows(kind, name, "int8", rows, 512)
    scales = _part(rows, scale_at(0, 512, 0), groups)
    assert scales[5, -1].isnan() and scales[:5].isfinite().all()


@pytest.mark.parametrize("K", [128, 2048, 7168])
@pytest.mark.parametrize("exact", ["decoded", "magic", "digits"])
@pytest.mark.parametrize("name", ["fp8", "int8", "int4", "q4_k", "q6_k"])
def test_rows_are_not_in_each_others_cache_sets(name, exact, K):
    """64 sets of 64 bytes: the same input of 64 tokens is in another one for each."""
    hows = [row_format(name, "bf16", exact)]
    if get_format(name).int8_kind:
        hows.append(row_format(name, "int8"))
    for how in hows:
        stride = row_bytes(K, how)
        assert stride % 64 == 0 and stride >= 2 * K
        assert len({t * stride // 64 % 64 for t in range(64)}) == 64


def _part(rows: torch.Tensor, at: int, count: int, dtype=torch.float32) -> torch.Tensor:
    """``count`` values of each row, from the byte ``at`` on."""
    return rows[:, at : at + count * dtype.itemsize].contiguous().view(dtype)


@needs_avx512
@pytest.mark.parametrize("name", ["int4", "q4_k", "q6_k"])
def test_digits_are_those_of_the_reference(name):
    """Bit for bit: zeros, the least and the largest numbers, outliers; what a bias adds; a NaN."""
    K = 256
    x = torch.randn(7, K, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    x[1, :128] = 0
    x[2] *= 1e-36
    x[3] *= 3e-39
    x[4] = torch.finfo(torch.bfloat16).max * x[4].sign()
    x[5, 7], x[5, 200] = 3e4, -255.0
    x[6] *= 2.0 ** torch.randint(-40, 40, (K,), generator=torch.Generator().manual_seed(4))
    how = row_format(name, "bf16", "digits")
    rows = torch.full((7, row_bytes(K, how)), 255, dtype=torch.uint8)
    rows[:, : 2 * K] = x.view(torch.uint8)
    _quantize_rows("amx", name, "bf16", rows, K)
    truth, groups = digits(x), K // 128
    value = sum(truth.q[j].double() * 256.0 ** (SLICES - 1 - j) for j in range(SLICES))
    value *= truth.scale.double().repeat_interleave(128, dim=1)
    largest = x.double().abs().view(7, groups, 128).amax(2).repeat_interleave(128, dim=1)
    off = (value - x.double()).abs()
    assert (off <= (largest * 2.0**-30).clamp(min=2.0**-127)).all()
    normal = x.double().abs() >= (largest * 2.0**-22).clamp(min=2.0**-118)
    assert normal.float().mean() > 0.5 and (off[normal] == 0).all()
    assert torch.equal(_part(rows, scale_at(0, K, 0), groups), truth.scale)
    at = slices_at(0, K, 0, 0)
    lowest = _part(rows, lowest_at(0, K, 0), groups, torch.int32)
    assert torch.equal(lowest != 0, (truth.q[-1].view(7, groups, 128) != 0).any(2))
    assert 0 < (lowest != 0).sum() < lowest.numel()
    seen = _part(rows, at, SLICES * K, torch.int8).view(7, K // 64, SLICES, 64)
    assert torch.equal(seen, truth.q.view(SLICES, 7, K // 64, 64).permute(1, 2, 0, 3))
    if how.bias:
        count = K // how.sum_k
        added = truth.q.view(SLICES, 7, count, how.sum_k).sum(3, dtype=torch.int32)
        seen = _part(rows, offset_at(0, K, 0, 0), SLICES * count, torch.int32)
        magic_offset = torch.tensor([MAGIC_BITS] * SHORT + [0], dtype=torch.int32)
        assert torch.equal(
            seen.view(7, count, SLICES), magic_offset - how.bias * added.permute(1, 2, 0)
        )
    if how.sums:
        by_group = x.double().view(7, -1, how.sum_k)
        units = SUM_UNIT * truth.scale.double().repeat_interleave(128 // how.sum_k, dim=1)
        for at, unit in ((sum_at(0, K, 0), 1.0), (unit_sum_at(0, K, 0), units)):
            seen = _part(rows, at, K // how.sum_k).double() * unit
            near = (seen - by_group.sum(2)).abs() <= 1e-6 * by_group.abs().sum(2)
            assert near[[0, 1, 2, 3, 5, 6]].all()  # the fifth's are infinite
    x[0, 200] = float("nan")
    rows[:, : 2 * K] = x.view(torch.uint8)
    _quantize_rows("amx", name, "bf16", rows, K)
    scales = _part(rows, scale_at(0, K, 0), groups)
    assert scales[0].isnan().tolist() == [False, True] and scales[1:].isfinite().all()


@needs_avx512
def test_sums_of_digits_are_joined_to_24_bits():
    """Up to the largest sums there are, 2**21; exactly where they are small; at a power of two."""

    @kernel("test-join")
    def joined(s, out):
        magic_offset = all_i32(MAGIC_BITS)
        s0, s1 = add_i32(load_i32(s), magic_offset), add_i32(load_i32(s + 64), magic_offset)
        value = join_short(s0, s1, add_i32(load_i32(s + 128), magic_offset))
        store_f32(out, value)
        store_f32(out + 64, join_lowest(value, load_i32(s + 192)))

    g = torch.Generator().manual_seed(8)
    s, out = torch.zeros(4, 16, dtype=torch.int32), torch.zeros(2, 16)
    for bits in range(1, 22):
        s.copy_(torch.randint(-(2**bits), 2**bits + 1, (4, 16), generator=g))
        s[:3, 0] = torch.tensor([-65536, 1, 0])  # rounded below 2**24, with the constant above it
        joined(s.data_ptr(), out.data_ptr())
        value = (256 * s[0].double() + s[1]) * 256 + s[2]
        assert ((out[0] - value).abs() <= 2.0**-23 * value.abs()).all()
        if bits < 7:
            assert torch.equal(out[0, 1:].double(), value[1:])
        assert torch.equal(out[1], (256 * out[0].double() + s[3]).float())


@needs_avx512
@pytest.mark.parametrize("base", [False, True])
def test_silu_is_within_bf16_rounding(base):
    silu_mul_row = avx512.make_silu_mul_row(_operations(base))

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


_SUMS = [(name, "bf16", "vdpbf16ps") for name in FORMATS] + [
    (name, "int8", "vpdpbusd") for name in ("int8", "int4", "q4_k", "q5_k", "q6_k")
]
_MANY_SUMS = [("bf16", "bf16"), ("int8", "bf16"), ("int8", "int8")]
"""Whose tiles of four tokens read both halves of a block in one pass."""


@needs_bf16
@pytest.mark.parametrize(
    ("name", "activations", "product", "M"),
    [(*sums, M) for sums in _SUMS for M in (1, 8)]
    + [(*sums, 4) for sums in _SUMS if sums[:2] in _MANY_SUMS],
)
def test_accumulators_live_in_registers(name, activations, product, M):
    """A register array that LLVM leaves in memory costs a load and a store for each dot product.

    (The scheduler may spill decoded rows, which costs nothing measurable.)
    """
    _check_sums(_assembly_of_tile(name, M, activations), product, M)


@needs_bf16
def test_prefetches_are_spread_over_an_unrolled_block():
    """More misses asked for at once than a core keeps track of halve the speed of reading."""
    assembly = _assembly_of_tile("int8", 1, "int8")
    asked = [part.count("prefetcht0") for part in assembly.split("vpdpbusd")]
    assert sum(asked) >= 16
    assert max(asked) <= 16, "the prefetches of several packed tiles stand together"


def _assembly_of_tile(name: str, M: int, activations: str) -> str:
    tile = avx512.make_tile(name, M, instructions(detect()), activations)
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
def test_sums_of_a_pass_live_in_registers(T, scale_k, minima, act_k, biased):
    built = avx512_passes.make_pass(T, scale_k, minima, act_k, biased, instructions(detect()))
    assembly = _assembly(built._library)
    _check_sums(assembly, "vpdpbusd" if act_k else "vdpbf16ps", 2 * T)


@pytest.mark.skipif("avx512f" not in detect().isa, reason="multiply-adds of AVX-512")
@pytest.mark.parametrize("T", [4, 8, 12])
def test_sums_of_a_pass_of_multiply_adds_live_in_registers(T):
    assembly = _assembly(fma.make_pass(T)._library)
    assert len(re.findall(r"vfmadd\d+ps\s.*%zmm", assembly)) >= 4 * T
    assert not re.search(r"vmov\w+\s+%zmm\d+, -?\d*\(%r[sb]p", assembly), "a sum is spilled"


def test_the_generic_kernel_is_chosen_without_avx512():
    with env.override(isa=frozenset({"avx512bw"})):
        assert resolve("auto", "fp8", detect()).name == "generic"
