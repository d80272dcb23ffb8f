"""Linears and norms by a call, against the reference in float64 and torch's own."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F

from pykernels import cpu, ref
from pykernels.errors import PykernelsError
from pykernels.quant import PackedMatrix, get_format
from pykernels.testing import assert_close

from ..kernels import variants

N, K = 70, 512
SUMS = 2e-6
"""What float32 sums of products of bfloat16 are off by."""


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize(("kernel", "fmt", "activations"), variants("bf16"))
@pytest.mark.parametrize("M", [0, 1, 35])
def test_linear(kernel: str, fmt: str, activations: str, M: int) -> None:
    how = get_format(fmt)
    weight, x, bias = how.quantize(randn(N, K) / 20), randn(M, K).bfloat16(), randn(N)
    packed = PackedMatrix.of(how, [weight])
    y = cpu.linear(x, packed, bias, kernel=kernel)
    assert_close(y, F.linear(x.double(), how.dequantize(weight).double(), bias.double()), SUMS)
    assert_close(y, ref.linear(x, weight, bias, fmt=how, dtype=torch.float64), SUMS)


@pytest.mark.parametrize(("kernel", "fmt", "activations"), variants("int8", names=("int8",)))
def test_linear_of_quantized_inputs(kernel: str, fmt: str, activations: str) -> None:
    how = get_format(fmt)
    weight, x = how.quantize(randn(N, K) / 20), randn(3, K).bfloat16()
    y = cpu.linear(x, PackedMatrix.of(how, [weight]), kernel=kernel, activations=activations)
    assert_close(y, ref.linear(x, weight, fmt=how), 0.02)  # 127 steps of each token's inputs


def test_inputs_of_any_strides_and_floats() -> None:
    how = get_format("bf16")
    packed = PackedMatrix.of(how, [how.quantize(randn(N, K))])
    x = randn(K, 6).bfloat16()
    y = cpu.linear(x.T.contiguous(), packed)
    for same in (x.T, x.T.float(), x.repeat_interleave(2, 1).T[::2]):
        assert torch.equal(cpu.linear(same, packed), y)


@pytest.mark.parametrize("shape", [(0, 48), (5, 48), (2, 3, 100)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, residual, weight = randn(*shape).to(dtype), (3 * randn(*shape)).to(dtype), randn(shape[-1])
    normed, none = cpu.rms_norm(x, weight, 1e-5)
    truth = F.rms_norm(x.double(), shape[-1:], weight.double(), 1e-5)
    assert none is None
    assert normed.dtype == torch.bfloat16
    assert bool(((normed.double() - truth).abs() <= truth.abs() * 2**-8).all())  # of bfloat16
    normed, total = cpu.rms_norm(x, weight, 1e-5, residual)
    assert total is not None
    assert torch.equal(total, x + residual)
    truth, _ = ref.rms_norm((x.double() + residual.double()), weight, 1e-5, dtype=torch.float64)
    assert bool(((normed.double() - truth).abs() <= truth.abs() * 2**-8 + 1e-30).all())


@pytest.mark.parametrize("H", [48, 101])
def test_post_norm_and_softcap(H: int) -> None:
    x, residual, weight, scale = randn(3, H), 9 * randn(3, H), randn(H), torch.tensor([0.7])
    truth = F.rms_norm(x.double(), (H,), weight.double(), 1e-5)
    assert_close(cpu.post_norm(x, weight, 1e-5), truth, SUMS)
    found = cpu.post_norm(x, weight, 1e-5, residual, scale)
    assert_close(found, (residual.double() + truth) * 0.7, SUMS)
    assert_close(cpu.softcap(9 * residual, 30.0), 30 * torch.tanh(9 * residual.double() / 30), SUMS)


BF16 = get_format("bf16")
PACKED = PackedMatrix.of(BF16, [BF16.quantize(torch.ones(4, 8))])
REFUSED = {
    "x is torch.float32 [2, 9]. Give float32 or": lambda: cpu.linear(torch.ones(2, 9), PACKED),
    "x is torch.int64 [2, 8]": lambda: cpu.linear(torch.ones(2, 8).long(), PACKED),
    "x is None, no torch tensor": lambda: cpu.linear(None, PACKED),
    "x lies on meta": lambda: cpu.linear(torch.ones(2, 8, device="meta"), PACKED),
    "bias is torch.float32 [8]": lambda: cpu.linear(torch.ones(2, 8), PACKED, torch.ones(8)),
    "weight is a Tensor, no PackedMatrix": lambda: cpu.linear(torch.ones(2, 8), torch.ones(4, 8)),
    "there are no 'int4' activations": lambda: cpu.linear(
        torch.ones(2, 8), PACKED, activations="int4"
    ),
    "weight is torch.float32 [3, 8]. Give": lambda: cpu.rms_norm(
        torch.ones(2, 8), torch.ones(3, 8), 1e-6
    ),
    "residual is torch.float32 [1, 8]": lambda: cpu.rms_norm(
        torch.ones(2, 8), torch.ones(8), 1e-6, torch.ones(1, 8)
    ),
    "a norm of no numbers": lambda: cpu.rms_norm(torch.ones(2, 0), torch.ones(0), 1e-6),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_fit_is_refused(message: str) -> None:
    with pytest.raises(PykernelsError, match=re.escape(message)):
        REFUSED[message]()
