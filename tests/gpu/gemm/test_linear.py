"""Linears with quantized weights against float64, no further off than torch's own bfloat16 is."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from pykernels import ref
from pykernels.errors import PykernelsError
from pykernels.gpu.gemm.linear import linear
from pykernels.gpu.gemm.weights import Matrices, empty_for_gpu, pack_for_gpu
from pykernels.gpu.plans.gemm import (
    DequantPlan,
    GemmPlan,
    GemvInt8Plan,
    GemvMmaPlan,
    SkinnyExpertsPlan,
    SkinnyPlan,
)
from pykernels.quant import Weight, get_format
from pykernels.testing import relative_error

FORMATS = ("bf16", "fp8", "int8", "int4", "int4-g128", "mxfp4", "q4_k", "q6_k", "int8-channel")


@functools.cache
def made(name: str, N: int, K: int) -> tuple[Weight, Matrices]:
    """A random matrix and its stack of one, on the CPU."""
    fmt = get_format(name)
    weight = fmt.quantize(torch.randn(N, K) / K**0.5)
    return weight, pack_for_gpu(fmt, [weight])


def check(
    name: str, M: int, N: int, K: int, device: torch.device, activations: str = "bf16", **how: Any
) -> None:
    weight, stack = made(name, N, K)
    fmt = get_format(name)
    x, bias = torch.randn(M, K).bfloat16(), torch.randn(N).bfloat16()
    y = linear(x.to(device), stack.to(device), bias.to(device), activations=activations, **how)
    truth = ref.linear(x, weight, bias, fmt=fmt, activations=activations, dtype=torch.float64)
    native = x @ fmt.dequantize(weight).bfloat16().T + bias
    exact = ref.linear(x, weight, bias, fmt=fmt, dtype=torch.float64)
    # A small sum's rounding flips: the error of few values is not that of many.
    assert relative_error(y.cpu(), truth) <= 1.3 * max(relative_error(native, exact), 2e-3)


@pytest.mark.parametrize("M", [1, 18])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_from_one_row_on(name: str, M: int, device: torch.device) -> None:
    check(name, M, 72, 512 if name.endswith("_k") else 320 if "8" in name else 384, device)


@pytest.mark.parametrize("M", [1, 20])
def test_fp8_activations(M: int, device: torch.device) -> None:
    check("fp8", M, 200, 320, device, "fp8")


PLANS = [
    ("int4", 5, GemmPlan(16, 32, 64, split_k=4), "K in four parts"),
    ("int4", 5, GemmPlan(16, 32, 64, split_k=5), "parts of different lengths"),
    ("int8", 16, GemmPlan(16, 64, 128, split_k=8), "more parts than steps: some are empty"),
    ("int8", 1, GemvInt8Plan(8, 64), "last step beyond K"),
    ("int8", 1, GemvInt8Plan(32, 128), "a step longer than K"),
    ("int8-channel", 1, GemvInt8Plan(16, 32), "one scale an output"),
    ("bf16", 33, GemmPlan(32, 64, 64, tma=True, group_m=1), "descriptors"),
    ("bf16", 40, GemmPlan(16, 32, 64, group_m=2), "a last group of fewer blocks of rows"),
    ("q6_k", 5, GemmPlan(16, 64, 64, unpack=True), "K-quants unpacked first"),
    ("int8", 5, GemmPlan(16, 64, 64, tma=True, unpack=True), "integers unpacked first"),
]


@pytest.mark.parametrize(("name", "M", "plan", "why"), PLANS, ids=[row[3] for row in PLANS])
def test_plans(name: str, M: int, plan: Any, why: str, device: torch.device) -> None:
    check(name, M, 72, 512 if name == "q6_k" else 384, device, plan=plan)


def test_a_narrow_matrix_of_ragged_rows(device: torch.device) -> None:
    """N no multiple of anything: scales cannot be copied in runs, tiles end inside."""
    for name in ("int4", "int8", "fp8", "bf16"):
        for M in (1, 6):
            check(name, M, 13, 128, device)


def test_large_and_tiny_inputs_survive_the_powers_of_two_of_gemv(device: torch.device) -> None:
    weight, stack = made("int8", 16, 128)
    for factor in (2.0**40, 1.0, 2.0**-30):
        x = (torch.randn(1, 128) * factor).bfloat16()
        y = linear(x.to(device), stack.to(device), plan=GemvInt8Plan(16, 32))
        truth = ref.linear(x, weight, fmt=get_format("int8"), dtype=torch.float64)
        assert relative_error(y.cpu(), truth) < 4e-3, factor


def test_inputs_that_begin_anywhere(device: torch.device) -> None:
    """No descriptor can begin at an odd address."""
    stack = made("bf16", 72, 64)[1].to(device)
    x = torch.randn(33 * 64 + 1, device=device).bfloat16()[1:].view(33, 64)
    plan = GemmPlan(32, 64, 64, tma=True)
    assert torch.equal(linear(x, stack, plan=plan), linear(x.clone(), stack, plan=plan))


def test_results_have_the_same_bits_every_time(device: torch.device) -> None:
    x = torch.randn(3, 384).bfloat16().to(device)
    stack = made("int4", 72, 384)[1].to(device)
    plan = GemmPlan(16, 32, 64, split_k=4)
    first = linear(x, stack, plan=plan)
    again = torch.full_like(first, float("nan"))
    assert linear(x, stack, plan=plan, out=again) is again
    assert torch.equal(first, again)


UNFIT = [
    ("int8", 2, 64, GemvMmaPlan(16, 2), "gemv_mma takes one row"),
    ("q4_k", 1, 256, GemvMmaPlan(16, 1), "two warps or more"),
    ("int4", 65, 64, SkinnyPlan(16, 2), "skinny_linear takes up to 64 rows"),
    ("bf16", 2, 64, SkinnyExpertsPlan(16, 2), "skinny_experts dequantizes"),
    ("bf16", 2, 64, DequantPlan(16), "dequant_gemm takes"),
    ("int4", 2, 640, DequantPlan(16, split_k=4), "5 steps in 4 parts leave one empty"),
    ("bf16", 2, 64, GemmPlan(16, 32, 64, split_k=2), "only weights to dequantize"),
]


@pytest.mark.parametrize(("name", "M", "K", "plan", "cause"), UNFIT)
def test_a_plan_that_does_not_fit_is_refused(
    name: str, M: int, K: int, plan: Any, cause: str, device: torch.device, monkeypatch: Any
) -> None:
    monkeypatch.setattr("pykernels.gpu.gemm.linear.arch", lambda device: (9, 0))
    stack = empty_for_gpu(get_format(name), 1, 16, K, device)
    x = torch.zeros(M, K, dtype=torch.bfloat16, device=device)
    with pytest.raises(PykernelsError, match=f"no kernel for that plan: .*{cause}"):
        linear(x, stack, plan=plan)


TENSOR_CORES = [GemvMmaPlan(16, 2), SkinnyPlan(16, 2), SkinnyExpertsPlan(16, 2, 8), DequantPlan(16)]


@pytest.mark.parametrize("plan", TENSOR_CORES)
def test_plans_of_the_tensor_cores_are_refused_elsewhere(
    plan: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = empty_for_gpu(get_format("fp8"), 1, 16, 128, device)
    x = torch.zeros(1, 128, dtype=torch.bfloat16, device=device)
    for arch, activations, why in (
        ((9, 0), "fp8", "go by a GemmPlan"),
        ((0, 0), "bf16", "no kern"),
    ):
        monkeypatch.setattr("pykernels.gpu.gemm.linear.arch", lambda device, arch=arch: arch)
        with pytest.raises(PykernelsError, match=why):
            linear(x, stack, plan=plan, activations=activations)


@pytest.mark.gpu
@pytest.mark.parametrize("M", [1, 16, 300])
@pytest.mark.parametrize("name", FORMATS)
def test_sizes_of_a_model(name: str, M: int) -> None:
    check(name, M, 1536, 2048, torch.device("cuda"))
    if name == "fp8":
        check(name, M, 1536, 2048, torch.device("cuda"), "fp8")


def meta_call(name: str, M: int, N: int, activations: str = "bf16", K: int = 7168) -> Any:
    stack = empty_for_gpu(get_format(name), 1, N, K, torch.device("meta"))
    x = torch.empty(M, K, dtype=torch.bfloat16, device="meta")
    bias = torch.empty(N, device="meta") if activations == "fp8" else None
    return f"{name} {M} {N}x{K}", lambda: linear(x, stack, bias, activations=activations)


COMPILES = [meta_call("int8", 1, 2048), meta_call("q4_k", 2048, 2048)]
ON_A_GPU = (("int4", 1), ("q4_k", 1), ("q6_k", 256))
COMPILES_ON_A_GPU = [meta_call(name, M, 2048) for name, M in ON_A_GPU]
