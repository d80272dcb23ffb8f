"""E4M3 in software, for GPUs whose Triton has no such type: every code, against torch's own."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from pykernels.gpu.attention.online_softmax import BITS, cache_to_bf16, cache_to_half
from pykernels.gpu.common.dequant import e4m3_to_float, float_to_e4m3

FP8 = torch.float8_e4m3fn


@triton.jit
def _dequantize(codes, values, TO: tl.constexpr, KIND: tl.constexpr):
    i = tl.arange(0, 256)
    code = tl.load(codes + i)
    if TO == "float32":  # weights
        value = e4m3_to_float(code)
    elif TO == "bf16":  # a cache, in prefill
        value = cache_to_bf16(code, KIND)
    else:  # a cache, in decode
        value = cache_to_half(code, KIND, False)
    tl.store(values + i, value.to(tl.float32))


@triton.jit
def _quantize(values, codes, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(codes + i, float_to_e4m3(tl.load(values + i)))


@pytest.mark.parametrize("to", ["float32", "bf16", "float16"])
def test_all_256_codes_are_dequantized_exactly(to: str, device: torch.device) -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    values = torch.full((256,), torch.inf, device=device)
    _dequantize[(1,)](codes, values, to, BITS)
    truth = codes.view(FP8).float()
    assert truth.isnan().sum() == 2
    assert torch.equal(values.isnan(), truth.isnan())
    assert torch.equal(values.nan_to_num(nan=1.0), truth.nan_to_num(nan=1.0))
    signs = values.signbit() == truth.signbit()
    assert signs[~truth.isnan()].all()  # of zeros too


def test_every_code_and_tie_is_quantized_as_torch_does(device: torch.device) -> None:
    codes = torch.arange(0x7F, dtype=torch.uint8).view(FP8).float()  # 0 .. 448
    ties = (codes[1:] + codes[:-1]) / 2
    near = torch.cat([torch.nextafter(ties, ties * 0), torch.nextafter(ties, ties * 2)])
    x = torch.cat([codes, ties, near])
    x = torch.cat([x, -x]).to(device)
    padded = torch.nn.functional.pad(x, (0, 1024 - len(x)))
    found = torch.zeros(1024, dtype=torch.uint8, device=device)
    _quantize[(1,)](padded, found, 1024)
    assert torch.equal(found[: len(x)], x.to(FP8).view(torch.uint8))
    past = torch.full((16,), 1e9, device=device)
    past[1], past[2] = torch.nan, torch.inf
    _quantize[(1,)](past, found, 16)
    assert found[:3].tolist() == [0x7E, 0x7F, 0x7E]
