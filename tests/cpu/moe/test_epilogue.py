"""What both stages do with finished sums, against float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pykernels.cpu.intrin import avx2, avx512
from pykernels.cpu.jit import kernel
from pykernels.cpu.moe import epilogue_portable, epilogue_vectors
from pykernels.cpu.moe.epilogue import Epilogue
from pykernels.ref.activation import swiglu
from pykernels.shapes import GEGLU, SWIGLU, ExpertSpec

from ..kernels import needs_avx2, needs_avx512, operations

KINDS = [
    pytest.param("avx512", marks=needs_avx512),
    pytest.param("base", marks=needs_avx512),
    pytest.param("avx2", marks=needs_avx2),
    "generic",
]
PLAIN, GPT_OSS = SWIGLU, ExpertSpec(1.702, 7.0, 1.0, bias=True)
SPECS = [
    pytest.param(PLAIN, id="silu"),
    pytest.param(GPT_OSS, id="clamped, biases"),
    pytest.param(GEGLU, id="gelu"),
]


def epilogue(which: str, spec: ExpertSpec) -> Epilogue:
    if which == "generic":
        return epilogue_portable.make_epilogue(spec)
    if which == "avx2":
        return epilogue_vectors.make_epilogue(which, avx2, 8, avx2.store_bf16, spec)
    store_bf16 = operations(which == "base").store_bf16
    return epilogue_vectors.make_epilogue(which, avx512, 16, store_bf16, spec)


@pytest.mark.parametrize("which", KINDS)
@pytest.mark.parametrize("spec", SPECS)
def test_swiglu_is_within_bf16_rounding(which, spec):
    made = epilogue(which, spec).swiglu

    @kernel(f"test-swiglu-{which}-{spec.name}")
    def call(gate, up, bias, h):
        made(gate, up, bias, h)

    corners = torch.tensor([0.0, -0.0, 1e-30, 3e38] * 8)
    gate = torch.cat([torch.linspace(-110, 110, 3200), corners]).view(-1, 32)
    up = torch.linspace(-9, 9, 32) if spec.bias else torch.ones(32)
    bias = torch.randn(64, generator=torch.Generator().manual_seed(0))
    out = torch.empty(gate.shape, dtype=torch.bfloat16)
    for i in range(len(gate)):
        call(gate[i].data_ptr(), up.data_ptr(), bias.data_ptr(), out[i].data_ptr())
    g, u = (gate + bias[:32], up + bias[32:]) if spec.bias else (gate, up.expand_as(gate))
    truth = swiglu(g.double(), u.double(), spec)
    error = (out.double() - truth).abs()
    tiny = 4e-36  # below -88.7 exp(-gate) overflows float32 and the result is -0, as torch's is
    assert (error <= truth.abs() * 2.0**-8 * 1.0001 + tiny).all()
    nan = torch.full((64,), float("nan"))
    call(nan.data_ptr(), nan.data_ptr(), nan.data_ptr(), out[0].data_ptr())
    assert out[0].isnan().all()


def test_geglu_is_gelu_in_its_tanh_form() -> None:
    gate, up = torch.linspace(-9, 9, 181).double(), torch.linspace(3, -3, 181).double()
    truth = torch.nn.functional.gelu(gate, approximate="tanh") * up
    torch.testing.assert_close(swiglu(gate, up, GEGLU), truth)


@pytest.mark.parametrize("which", KINDS)
@pytest.mark.parametrize("spec", SPECS)
def test_a_bias_is_weighted_too(which, spec):
    made = epilogue(which, spec).weighted_add

    @kernel(f"test-weighted-add-{which}-{spec.name}")
    def call(value, bias, acc):
        made(np.float32(1.5), value, bias, acc)

    value, bias, acc = torch.randn(3, 32)
    expected = acc + 1.5 * (value + bias if spec.bias else value)
    call(value.data_ptr(), bias.data_ptr(), acc.data_ptr())
    torch.testing.assert_close(acc, expected)
