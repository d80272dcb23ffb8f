"""What formats refuse: matrices that they have no numbers for, and weights that are not theirs."""

from __future__ import annotations

import pytest
import torch

from pykernels.errors import PykernelsError
from pykernels.quant import FORMATS, PackedExperts, Weight, get_format
from pykernels.shapes import MoEShape

NAN, INF = float("nan"), float("inf")


def _with(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    matrix = torch.randn(33, 512).to(dtype)
    matrix[32, 300] = value
    return matrix


MATRICES = {
    **{f"{bad}": (lambda bad=bad: _with(bad), "holds NaN or infinities") for bad in (NAN, INF)},
    "too large": (lambda: _with(-1e200, torch.float64), r"up to 1e\+200, too large for"),
    "one dimension": (lambda: torch.zeros(256), r"of shape \(256,\) cannot become .*Give a matrix"),
    "no inputs": (lambda: torch.zeros(2, 0), r"of shape \(2, 0\) cannot become"),
    "no outputs": (lambda: torch.zeros(0, 256), r"of shape \(0, 256\) cannot become"),
    "int8": (lambda: torch.zeros(32, 256, dtype=torch.int8), "of torch.int8 .*Give .* float32"),
    "fp8": (lambda: torch.zeros(32, 256).to(torch.float8_e4m3fn), "of torch.float8_e4m3fn cannot"),
    "meta": (lambda: torch.zeros(32, 256, device="meta"), "on meta cannot become .*Copy it with"),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("make", "told"), MATRICES.values(), ids=MATRICES)
def test_a_matrix_is_refused_in_one_line(name, make, told):
    if name == "bf16" and "NaN" in told:
        return  # it keeps them: test_bf16_keeps_what_is_not_finite
    with pytest.raises(PykernelsError, match=told) as error:
        get_format(name).quantize(make())
    assert name in str(error.value) and "\n" not in str(error.value)


LAST = {"float32": torch.finfo(torch.float32).max, "bfloat16": torch.finfo(torch.bfloat16).max}
TOO_LARGE = {
    "float32": ("bf16", "f16", "int4", "int4-g128", "int8-channel", "int4-channel"),
    "bfloat16": ("f16", "int8-channel", "int4-channel"),
}
"""Formats that would round these numbers up to infinities; K-quants have fp16 scales."""


@pytest.mark.parametrize("last", LAST)
@pytest.mark.parametrize("name", [n for n, fmt in FORMATS.items() if torch.uint8 != fmt.dtype])
def test_the_largest_numbers_never_become_infinite(name, last):
    fmt, matrix = get_format(name), torch.randn(40, 300)
    matrix[::2, 1::3] = -LAST[last]
    if name in TOO_LARGE[last]:
        with pytest.raises(PykernelsError, match=rf"up to 3\.\d+e\+38, too large for {name}\."):
            fmt.quantize(matrix)
    else:
        held = fmt.dequantize(fmt.quantize(matrix))
        assert ((held - matrix).abs() <= LAST[last] / 7 * 0.51).all()  # False for infinities


def _spoilt(data: torch.Tensor, value: int) -> torch.Tensor:
    bits = data.clone()
    bits.view(torch.uint8)[-1, -1] = value & 0xFF
    return bits


E4M3 = torch.float8_e4m3fn
WEIGHTS = {
    "a tensor": ("bf16", lambda w: w.data, "is a Tensor, no Weight.*bf16'.*quantize"),
    "shape": ("fp8", lambda w: Weight(w.data[:, :9], w.scale), r"has shape \(160, 9\), expected"),
    "dtype": ("fp8", lambda w: Weight(w.data.float(), w.scale), "is torch.float32, format fp8"),
    "meta": ("fp8", lambda w: Weight(w.data.to("meta"), w.scale), "is on meta. Copy it with .cpu"),
    "no scales": ("fp8", lambda w: Weight(w.data), r"scales of shape None, .* needs \(2, 2\)"),
    "scales": ("fp8", lambda w: Weight(w.data, w.scale[:1]), r"shape \(1, 2\), format fp8 needs"),
    "infinite scale": ("fp8", lambda w: Weight(w.data, w.scale / 0), "scales that are NaN or inf"),
    "NaN scale": ("int8-channel", lambda w: Weight(w.data, w.scale * NAN), "scales that are NaN"),
    "NaN code": ("fp8", lambda w: Weight(_spoilt(w.data, 0xFF), w.scale), "codes that are NaN"),
    "NaN code, channel": (
        "fp8-channel",
        lambda w: Weight(_spoilt(w.data, 0x7F), w.scale),
        "codes that are NaN",
    ),
    "int4 too large": ("int4", lambda w: Weight(_spoilt(w.data, 9), w.scale), "int4 takes -8 .. 7"),
    "int4 too small": ("int4", lambda w: Weight(_spoilt(w.data, -9), w.scale), "takes -8 .. 7"),
    "int8 of -128": ("int8", lambda w: Weight(_spoilt(w.data, -128), w.scale), "takes -127 .. 127"),
    "mxfp4 code": ("mxfp4", lambda w: Weight(_spoilt(w.data, 16), w.scale), "codes up to 16. Give"),
    "infinite weight": ("f16", lambda w: Weight(w.data / 0), "weights that are NaN or infinite"),
    "zero-point code": ("int4-zp", lambda w: Weight(_spoilt(w.data, 16), w.scale), "codes up to"),
    "zero point": ("int4-zp", lambda w: Weight(w.data, w.scale + 0.5), "are no integers of 0 .."),
    "nvfp4 scale": ("nvfp4", lambda w: Weight(w.data, _spoilt(w.scale, 0x7F)), "NaN, infinite or"),
    "mxfp4 scale": (
        "mxfp4",
        lambda w: Weight(w.data, _spoilt(w.scale, 255)),
        "a scale of 255, which is NaN",
    ),
}


@pytest.mark.parametrize(("name", "spoil", "told"), WEIGHTS.values(), ids=WEIGHTS)
def test_a_weight_is_refused_by_name(name, spoil, told):
    fmt = get_format(name)
    good = fmt.quantize(torch.randn(160, 160))
    fmt.check(good, 160, 160)
    experts = PackedExperts(MoEShape(E=1, H=160, I=160, topk=1), fmt)
    with pytest.raises(PykernelsError, match=f"expert 0's gate_proj .*{told}") as error:
        experts.pack(0, spoil(good), good, good)
    assert "\n" not in str(error.value)


def test_every_finite_e4m3_code_is_taken():
    fmt, codes = get_format("fp8"), torch.arange(256, dtype=torch.uint8)
    finite = codes[codes & 0x7F != 0x7F].repeat(160, 1)[:, :136]
    fmt.check(Weight(finite.view(E4M3), torch.ones(2, 2)), 160, 136)


@pytest.mark.parametrize("name", [name for name in FORMATS if FORMATS[name].scale_dtypes])
def test_scales_of_another_dtype_are_converted_or_refused(name):
    """The tasks that pack read a scale's bits: of another dtype they would be another number."""
    fmt = get_format(name)
    experts = PackedExperts(MoEShape(E=1, H=256, I=256, topk=1), fmt)
    made = fmt.quantize(torch.randn(256, 256))
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8):
        other = Weight(made.data, made.scale.to(dtype))
        if dtype in fmt.scale_dtypes:
            experts.pack(0, other, other, other)
            assert torch.equal(experts.unpack(0)[2].scale.double(), other.scale.double())
        else:
            with pytest.raises(PykernelsError, match=f"gate_proj has scales of {dtype}, format"):
                experts.pack(0, other, made, made)


def test_unknown_experts_and_formats_are_refused():
    fmt = get_format("bf16")
    experts = PackedExperts(MoEShape(E=2, H=64, I=32, topk=1), fmt)
    zeros = [fmt.quantize(torch.zeros(*s)) for s in ((32, 64), (32, 64), (64, 32))]
    for expert in (2, -1):  # which is the last one to Python
        with pytest.raises(PykernelsError, match=f"no expert {expert} in a layer of 2"):
            experts.pack(expert, *zeros)
    assert experts.missing() == [0, 1]
    with pytest.raises(PykernelsError, match="bf16, f16, fp8, fp8-channel"):
        get_format("int3")
