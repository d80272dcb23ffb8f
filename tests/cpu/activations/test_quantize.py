"""Quantized rows: the bytes of the reference, whatever quantizes them; sums of int8 slices."""

from __future__ import annotations

import pytest
import torch

from pykernels.cpu.activations import quantize_portable, quantize_vectors
from pykernels.cpu.activations.int8_slices import MAGIC_BITS, SHORT, make_joins
from pykernels.cpu.activations.row_layout import (
    SLICES,
    SUM_UNIT,
    RowFormat,
    codes_at,
    lowest_at,
    offset_at,
    row_bytes,
    row_format,
    scale_at,
    slices_at,
    sum_at,
    unit_sum_at,
)
from pykernels.cpu.intrin import avx512, avx512_bytes
from pykernels.cpu.intrin.avx512 import store_f32
from pykernels.cpu.intrin.avx512_bytes import add_i32, all_i32, load_i32
from pykernels.cpu.intrin.sync import call_routine
from pykernels.cpu.jit import kernel
from pykernels.quant import FORMATS, get_format
from pykernels.quant.activations import int8_slices, quantize, sums

from ..kernels import VECTORS, needs_avx512


@kernel("test-quantize-row")
def _call(routine, row, K):
    call_routine(routine, (row, K, 0, K))


def quantized(how: RowFormat | None, x: torch.Tensor, by: str) -> torch.Tensor:
    """uint8 [T, row bytes] of x, bf16 [T, K]; what nobody writes is 255."""
    T, K = x.shape
    rows = torch.full((T, row_bytes(K, how)), 255, dtype=torch.uint8)
    rows[:, : 2 * K] = x.contiguous().view(torch.uint8)
    if how:
        if by == "generic":
            made = quantize_portable.make_quantize_row(how)
        else:
            made = quantize_vectors.make_quantize_row(how, by)
        for row in rows:
            _call(made.address, row.data_ptr(), K)
    return rows


def _part(rows: torch.Tensor, at: int, count: int, dtype=torch.float32) -> torch.Tensor:
    """``count`` values of each row, from the byte ``at`` on."""
    return rows[:, at : at + count * dtype.itemsize].contiguous().view(dtype)


@pytest.mark.parametrize("by", [*VECTORS, "generic"])
@pytest.mark.parametrize("name", ["int4", "q4_k", "q6_k"])
def test_int8_codes_are_those_of_the_reference(name, by):
    """Codes, scales and sums, bit for bit; also of zeros, tiny values and a NaN."""
    x = torch.randn(6, 512, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    x[1, :256] = 0
    x[2] *= 1e-38
    x[3, 7], x[3, 300] = 50.0, -50.0
    how = row_format(name, "int8")
    rows, truth = quantized(how, x, by), quantize(x, FORMATS[name].int8_kind)
    count = 512 // how.sum_k
    assert torch.equal(_part(rows, codes_at(0, 512), 512, torch.int8), truth.q)
    assert torch.equal(_part(rows, scale_at(0, 512, 0), 512 // how.act_k), truth.scale)
    added = sums(truth.q, how.sum_k)
    wanted = -how.bias * added.int() if how.bias else added.float()
    assert torch.equal(_part(rows, sum_at(0, 512, 0), count, wanted.dtype), wanted)
    x[5, 400] = float("nan")
    scales = _part(quantized(how, x, by), scale_at(0, 512, 0), 512 // how.act_k)
    assert scales[5, -1].isnan() and scales[:5].isfinite().all()


@pytest.mark.parametrize("by", VECTORS)
@pytest.mark.parametrize("name", ["int4", "q4_k", "q6_k"])
def test_int8_slices_are_those_of_the_reference(name, by):
    """Bit for bit: zeros, the least and the largest numbers, outliers; what a bias adds; a NaN."""
    K = 256
    x = torch.randn(7, K, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    x[1, :128] = 0
    x[2] *= 1e-36
    x[3] *= 3e-39
    x[4] = torch.finfo(torch.bfloat16).max * x[4].sign()
    x[5, 7], x[5, 200] = 3e4, -255.0
    x[6] *= 2.0 ** torch.randint(-40, 40, (K,), generator=torch.Generator().manual_seed(4))
    how = row_format(name, "bf16", "int8_slices")
    rows = quantized(how, x, by)
    truth, groups = int8_slices(x), K // 128
    value = sum(truth.q[j].double() * 256.0 ** (SLICES - 1 - j) for j in range(SLICES))
    value *= truth.scale.double().repeat_interleave(128, dim=1)
    largest = x.double().abs().view(7, groups, 128).amax(2).repeat_interleave(128, dim=1)
    off = (value - x.double()).abs()
    assert (off <= (largest * 2.0**-30).clamp(min=2.0**-127)).all()
    normal = x.double().abs() >= (largest * 2.0**-22).clamp(min=2.0**-118)
    assert normal.float().mean() > 0.5 and (off[normal] == 0).all()
    assert torch.equal(_part(rows, scale_at(0, K, 0), groups), truth.scale)
    lowest = _part(rows, lowest_at(0, K, 0), groups, torch.int32)
    assert torch.equal(lowest != 0, (truth.q[-1].view(7, groups, 128) != 0).any(2))
    assert 0 < (lowest != 0).sum() < lowest.numel()
    found = _part(rows, slices_at(0, K, 0, 0), SLICES * K, torch.int8).view(7, K // 64, SLICES, 64)
    assert torch.equal(found, truth.q.view(SLICES, 7, K // 64, 64).permute(1, 2, 0, 3))
    if how.bias:
        count = K // how.sum_k
        added = truth.q.view(SLICES, 7, count, how.sum_k).sum(3, dtype=torch.int32)
        found = _part(rows, offset_at(0, K, 0, 0), SLICES * count, torch.int32)
        magic = torch.tensor([MAGIC_BITS] * SHORT + [0], dtype=torch.int32)
        assert torch.equal(found.view(7, count, SLICES), magic - how.bias * added.permute(1, 2, 0))
    if how.sums:
        by_group = x.double().view(7, -1, how.sum_k)
        units = SUM_UNIT * truth.scale.double().repeat_interleave(128 // how.sum_k, dim=1)
        for at, unit in ((sum_at(0, K, 0), 1.0), (unit_sum_at(0, K, 0), units)):
            found = _part(rows, at, K // how.sum_k).double() * unit
            near = (found - by_group.sum(2)).abs() <= 1e-6 * by_group.abs().sum(2)
            assert near[[0, 1, 2, 3, 5, 6]].all()  # the fifth's are infinite
    x[0, 200] = float("nan")
    scales = _part(quantized(how, x, by), scale_at(0, K, 0), groups)
    assert scales[0].isnan().tolist() == [False, True] and scales[1:].isfinite().all()


@pytest.mark.parametrize("by", VECTORS)
@pytest.mark.parametrize("power", [1, 60])
def test_floats_are_the_inputs_over_their_scales(power, by):
    """Exactly, but where all of a group are tiny; what is not finite stays so."""
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    x[1, :128], x[1, 128:] = 0, torch.finfo(torch.bfloat16).max
    x[2] *= 1e-36
    x[3, 7], x[3, 200] = float("inf"), float("nan")
    rows = quantized(RowFormat("floats", 128, 128, power=power), x, by)
    floats = _part(rows, codes_at(0, 256), 256).view(4, 2, 128)
    scales = _part(rows, scale_at(0, 256, 0), 2)
    assert torch.equal((floats[:3] * scales[:3, :, None]).flatten(1), x[:3].float())
    largest = floats[:1].abs().amax(2)
    assert ((largest >= 2.0**power) & (largest < 2.0 ** (power + 1))).all()
    assert not (floats[3] * scales[3, :, None]).sum(1).isfinite().any()


@needs_avx512
def test_sums_of_int8_slices_are_joined_to_24_bits():
    """Up to the largest sums there are, 2**21; exactly where they are small; at a power of two."""

    join_short, join_lowest = make_joins(avx512, avx512_bytes)

    @kernel("test-join")
    def joined(s, out):
        magic = all_i32(MAGIC_BITS)
        s0, s1 = add_i32(load_i32(s), magic), add_i32(load_i32(s + 64), magic)
        value = join_short(s0, s1, add_i32(load_i32(s + 128), magic))
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


@pytest.mark.parametrize("K", [128, 2048, 7168])
@pytest.mark.parametrize("name", ["fp8", "int8", "int4", "q4_k", "q6_k"])
def test_rows_fall_into_different_cache_sets(name, K):
    """64 sets of 64 bytes: the same input of 64 tokens is in another one for each."""
    hows = [row_format(name, "bf16", exact) for exact in ("bf16", "magic", "int8_slices")]
    if get_format(name).int8_kind:
        hows.append(row_format(name, "int8"))
    for how in hows:
        stride = row_bytes(K, how)
        assert stride % 64 == 0 and stride >= 2 * K
        assert len({t * stride // 64 % 64 for t in range(64)}) == 64
