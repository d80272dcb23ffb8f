"""Every format's stated error bound, in numbers: it holds, and half of it would not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pykernels.quant import FORMATS, Format

N, K = 256, 1024
Bound = Callable[[Format, torch.Tensor], torch.Tensor]


def _matrices() -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    gauss, spread = (torch.randn(N, K, generator=g) for _ in range(2))
    steps = torch.randn(N, K // 32, generator=g).repeat_interleave(32, dim=1)
    return [
        gauss,
        gauss * spread.exp(),
        torch.rand(N, K, generator=g),
        gauss * (2 * steps).exp(),
        gauss.abs() + 10,
        -gauss.abs() - 10,
        steps,
        gauss.sign(),
        gauss * (spread > 1.5),
    ]


def _amax(matrix: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The largest magnitude of the part that each weight shares a scale with: [N, K]."""
    parts = matrix.abs().view(N // rows, rows, K // columns, columns).amax((1, 3))
    return parts.repeat_interleave(rows, 0).repeat_interleave(columns, 1)


def _e4m3(rows: int, columns: int) -> Bound:
    return lambda _, w: (w.abs() * 2.0**-4).maximum(_amax(w, rows, columns) * 2.0**-10 / 448)


def _steps(columns: int, steps: float, rounded_up: float = 0.0) -> Bound:
    return lambda _, w: _amax(w, 1, columns) / steps / 2 * (1 + rounded_up)


def _mxfp4(fmt: Format, matrix: torch.Tensor) -> torch.Tensor:
    scale = torch.exp2(_amax(matrix, 1, 32).log2().floor() - 2)
    size = matrix.abs()
    return torch.where(size > 6 * scale, 2 * scale, (size / 4).maximum(scale / 4))


def _affine(fmt: Format, matrix: torch.Tensor) -> torch.Tensor:
    groups = matrix.view(N, K // 256, 8, 32)
    span = groups.amax(3).clamp(min=0) - groups.amin(3).clamp(max=0)
    return (span.amax(2) * 1.5 / ((1 << fmt.bits) - 1) + 6e-5).repeat_interleave(256, 1)


def _range(matrix: torch.Tensor, columns: int) -> torch.Tensor:
    """Of the part that each weight shares a scale with."""
    parts = matrix.view(N, K // columns, columns)
    return (parts.amax(2) - parts.amin(2)).repeat_interleave(columns, 1)


def _least(matrix: torch.Tensor) -> torch.Tensor:
    return matrix.view(N, K // 32, 32).amin(2).abs().repeat_interleave(32, 1)


def _affine32(fmt: Format, matrix: torch.Tensor) -> torch.Tensor:
    levels, span = (1 << fmt.bits) - 1, _range(matrix, 32)
    return span / levels / 2 + (span + _least(matrix)) * 2.0**-11 + (levels + 1) * 2.0**-25 * 1.05


def _symmetric32(fmt: Format, matrix: torch.Tensor) -> torch.Tensor:
    middle = 1 << fmt.bits - 1
    return _amax(matrix, 1, 32) / middle * 1.01 + middle * 2.0**-25 * 1.05


def _ternary(columns: int) -> Bound:
    return lambda _, w: _amax(w, 1, columns) * (0.5 + 2.0**-11) + 2.0**-25


def _zero_point(columns: int) -> Bound:
    def bound(fmt: Format, matrix: torch.Tensor) -> torch.Tensor:
        parts = matrix.view(N, K // columns, columns)
        span = parts.amax(2).clamp(min=0) - parts.amin(2).clamp(max=0)
        return (span / 15 / 2 * (1 + 2.0**-10) + 2.0**-25).repeat_interleave(columns, 1)

    return bound


BOUNDS: dict[str, Bound] = {
    "bf16": lambda _, w: w.abs() * 2.0**-8,
    "f16": lambda _, w: w.abs() * 2.0**-11 + 2.0**-25,
    "fp8": _e4m3(128, 128),
    "fp8-channel": _e4m3(1, K),
    "int8": _steps(128, 127, 2.0**-7),
    "int8-channel": _steps(K, 127.5),
    "int4": _steps(32, 7, 2.0**-7),
    "int4-g128": _steps(128, 7, 2.0**-7),
    "int4-channel": _steps(K, 7.5),
    "int4-zp": _zero_point(32),
    "int4-zp-g128": _zero_point(128),
    "mxfp4": _mxfp4,
    "nvfp4": lambda _, w: _amax(w, 1, 16) * 0.178 + _amax(w, N, K) * 2.0**-10 / 448,
    "q4_k": _affine,
    "q5_k": _affine,
    "q6_k": lambda _, w: _amax(w, 1, 256) / 32 + 1.3e-4,
    "q3_k": lambda _, w: _amax(w, 1, 256) * 0.28 + 7e-5,
    "q2_k": _affine,
    "q8_0": lambda _, w: _amax(w, 1, 32) / 127 * 0.57 + 4e-6,
    "q4_0": _symmetric32,
    "q4_1": _affine32,
    "q5_0": _symmetric32,
    "q5_1": _affine32,
    "iq4_nl": lambda _, w: _amax(w, 1, 32) * 14 / 127 * 1.01 + 4e-6,
    "iq4_xs": lambda _, w: _amax(w, 1, 256) * 0.142 * 1.01 + 1e-4,
    "iq3_s": lambda _, w: _amax(w, 1, 256) * 0.5 + 3e-5,
    "iq2_s": lambda _, w: _amax(w, 1, 256) * 0.8 + 2e-5,
    "iq2_xs": lambda _, w: _amax(w, 1, 256) * 1.3 + 2e-5,
    "iq2_xxs": lambda _, w: _amax(w, 1, 256) * 1.4 + 2e-5,
    "iq3_xxs": lambda _, w: _amax(w, 1, 256) * 1.2 + 3e-5,
    "iq1_s": lambda _, w: _amax(w, 1, 256) * 1.3 + 2e-5,
    "iq1_m": lambda _, w: _amax(w, 1, 256) * 1.3 + 2e-5,
    "tq1_0": _ternary(256),
    "tq2_0": _ternary(256),
    "q2_0": _ternary(64),
    "q1_0": lambda _, w: _amax(w, 1, 128) + 2.0**-25,
}


@pytest.mark.parametrize("name", FORMATS)
def test_the_bound_holds_and_half_of_it_does_not(name):
    fmt, worst = FORMATS[name], 0.0
    for matrix in _matrices():
        error = (fmt.dequantize(fmt.quantize(matrix)) - matrix).abs()
        worst = max(worst, float((error / BOUNDS[name](fmt, matrix)).max()))
    assert 0.5 < worst <= 1.0001, fmt.error


@pytest.mark.filterwarnings("ignore:a matrix that becomes")
@pytest.mark.parametrize("size", [1e-30, 1e-6, 1e4])
@pytest.mark.parametrize("name", FORMATS)
def test_the_bound_holds_at_any_size(name, size):
    """Groups, rows and blocks of zeros too, and subnormal scales."""
    fmt, matrix = FORMATS[name], _matrices()[0] * size
    matrix[7], matrix[:128, 128:256], matrix[9, 32:160] = 0, 0, 0
    made = fmt.quantize(matrix)
    error = (fmt.dequantize(made) - matrix).abs()
    assert (error <= BOUNDS[name](fmt, matrix) * 1.0001 + 2.0**-128).all(), fmt.error
    assert not fmt.dequantize(made)[7].any()
    fmt.check(made, N, K)
