"""Formats and the tile layout: bits survive packing, errors stay in their stated bounds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pykernels.quant import FORMATS, Format, PackedExperts, Weight, get_format
from pykernels.quant.fp8 import e4m3_values
from pykernels.quant.integer import Integer
from pykernels.quant.layout import N_BLOCK, ceil_to, pack_fours, pack_tiles, padded
from pykernels.quant.zero_point import ZeroPoint
from pykernels.ref import isa
from pykernels.shapes import MoEShape

FINITE = [code for code in range(256) if code & 0x7F != 0x7F]


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _random(fmt: Format, N: int, K: int) -> Weight:
    """Every code, where that can be."""
    if isinstance(fmt, Integer):
        data = torch.randint(fmt.low, fmt.high + 1, (N, K), dtype=torch.int8)
    elif fmt.name in ("mxfp4", "nvfp4") or isinstance(fmt, ZeroPoint):
        data = torch.randint(0, 16, (N, K), dtype=torch.uint8)
    else:
        rows, columns = fmt.data_shape(N, K)
        bits = torch.randint(0, 256, (rows, columns * fmt.dtype.itemsize), dtype=torch.uint8)
        data = bits.view(fmt.dtype)
    if fmt.name == "tq1_0":  # of the bytes that mean the same, the one that is written
        blocks = fmt.split(data.view(-1, fmt.stored_bytes))
        data = fmt.join(blocks).view(data.shape)
    return Weight(data, fmt.quantize(torch.randn(N, K)).scale if fmt.scale_shape(N, K) else None)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize(("N", "K"), [(32, 128), (1, 1), (97, 300), (160, 136), (33, 127)])
def test_unpacking_is_the_inverse_of_packing(fmt, N, K):
    K = ceil_to(K, fmt.k_multiple)
    weight, count = _random(fmt, N, K), padded(N, K)[0] // N_BLOCK
    assert fmt.logical_shape(weight) == (N, K)
    blocks = torch.full((count, fmt.block_bytes(K)), 0xAB, dtype=torch.uint8)
    scales = torch.full((count, fmt.scale_bytes(K)), 0xAB, dtype=torch.uint8)
    fmt.pack(weight, blocks, scales)
    back = fmt.unpack(blocks, scales, N, K)
    assert _same_bits(back.data, weight.data)
    assert (back.scale is None) == (weight.scale is None)
    assert back.scale is None or torch.equal(back.scale, weight.scale)


@pytest.mark.parametrize("name", FORMATS)
def test_packed_experts_give_back_what_they_took(name):
    fmt = get_format(name)
    H, I = (ceil_to(size, fmt.k_multiple) for size in (200, 72))  # noqa: E741
    experts = PackedExperts(MoEShape(E=3, H=H, I=I, topk=2), fmt)
    weights = [fmt.quantize(torch.nn.Parameter(torch.randn(*s))) for s in ((I, H), (I, H), (H, I))]
    experts.pack(1, *weights)
    assert experts.missing() == [0, 2]
    for packed, original in zip(experts.unpack(1), weights, strict=True):
        assert _same_bits(packed.data, original.data) and not original.data.requires_grad
    assert experts.gate_up.data_ptr() % 64 == 0 and experts.down.data_ptr() % 64 == 0


def test_bytes_per_expert_counts_weights_and_scales():
    experts = PackedExperts(MoEShape(E=2, H=256, I=128, topk=1), get_format("fp8"))
    blocks = 2 * (128 // 32) * (256 // 128) + (256 // 32) * (128 // 128)
    assert experts.bytes_per_expert == 3 * 256 * 128 + 4 * blocks


def test_a_packed_block_is_a_b_tile():
    """tdpbf16ps on 1 KiB of a packed block, as it lies, is the matrix product."""
    w, x = torch.randn(32, 128).bfloat16(), torch.randn(16, 128).bfloat16()
    blocks = torch.empty(1, 32 * 128 * 2, dtype=torch.uint8)
    pack_tiles(w, blocks)
    tiles = blocks.view(torch.bfloat16).view(4, 2, 16, 32)  # [step][half][pair-row][16 n x 2 k]
    for half in range(2):
        c = np.zeros((16, 16), np.float32)
        for step, a in enumerate(x.float().split(32, dim=1)):
            c = isa.tdpbf16ps(c, a.numpy(), tiles[step, half].float().numpy())
        truth = x.double() @ w[16 * half : 16 * half + 16].double().T
        assert np.allclose(c, truth.numpy(), rtol=1e-6, atol=1e-5)


def test_byte_order_interleaves_pair_rows_by_eight_bytes():
    """Unpacking low and high bytes of each 128-bit lane must give pair-rows 2g and 2g + 1."""
    codes = torch.arange(32 * 128, dtype=torch.int32).to(torch.uint8).view(32, 128)
    blocks = torch.empty(1, 32 * 128, dtype=torch.uint8)
    pack_tiles(codes.view(torch.float8_e4m3fn), blocks)
    lanes = blocks.view(4, 2, 8, 4, 2, 8)  # [step][half][group][lane][pair-row][8 bytes]
    for parity in range(2):
        row = lanes[1, 1, 3, :, parity].reshape(16, 2)  # 16 n x 2 k
        k = 32 + 2 * (2 * 3 + parity)
        assert torch.equal(row, codes[16:32, k : k + 2])


def test_every_finite_e4m3_code_dequantizes_by_the_formula():
    table = e4m3_values()
    for code in FINITE:
        e, m = code >> 3 & 15, code & 7
        magnitude = 2.0 ** (e - 7) * (1 + m / 8) if e else 2.0**-6 * m / 8
        assert table[code] == (-magnitude if code & 0x80 else magnitude), hex(code)
    assert table[[0x7F, 0xFF]].isnan().all()
    assert _same_bits(table[FINITE].to(torch.bfloat16).float(), table[FINITE]), "exact in bf16"


def test_bf16_keeps_what_is_not_finite():
    matrix = torch.tensor([[float("inf"), -float("inf"), float("nan"), 1.0]])
    assert _same_bits(get_format("bf16").quantize(matrix).data, matrix.bfloat16())


def test_mxfp4_takes_the_nearest_value_or_the_even_code():
    fmt = get_format("mxfp4")
    row = torch.tensor([[4.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.0, 6.5, -0.2, 0.26]])
    seen = fmt.dequantize(fmt.quantize(row))
    assert seen.tolist() == [[4.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -4.0, 6.0, 0.0, 0.5]]


def test_fours_are_the_int8_tile_order():
    """Row r of a B tile holds, for 16 n, k = 4r .. 4r + 3 (Intel SDM, TDPBSSD)."""
    data = torch.randint(-127, 128, (32, 128), dtype=torch.int8)
    blocks = torch.empty(1, 32 * 128, dtype=torch.uint8)
    pack_fours(data, blocks, bits=8)
    tiles = blocks.view(torch.int8).view(2, 2, 16, 16, 4)
    for step, half, r, n, k in [(0, 0, 0, 0, 0), (1, 1, 9, 5, 3), (1, 0, 15, 15, 2)]:
        assert tiles[step, half, r, n, k] == data[16 * half + n, 64 * step + 4 * r + k]


@pytest.mark.filterwarnings("ignore:a matrix that becomes")
@pytest.mark.parametrize("name", [name for name in FORMATS if name != "bf16"])
def test_the_least_float32_numbers_stay_numbers(name):
    fmt = get_format(name)
    matrix = torch.tensor([0.0, 2.0**-149, -(2.0**-148), 2.0**-142] * 64).expand(128, -1)
    again = fmt.dequantize(fmt.quantize(matrix))
    assert ((again - matrix).abs() <= 2.0**-142).all()  # False for NaN
