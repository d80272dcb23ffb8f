"""Linears whose weights are decoded in registers: the kernels on a GPU, on any CPU by the shim."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pykernels import ref
from pykernels.errors import PykernelsError
from pykernels.gpu.activation import silu_mul
from pykernels.gpu.common import launch
from pykernels.gpu.gemm.linear import linear
from pykernels.gpu.gemm.select import dequant_plan, gemv_mma_plan, kernel_of, select, skinny_plan
from pykernels.gpu.gemm.weights import empty_for_gpu, pack_for_gpu
from pykernels.gpu.norm import rms_norm
from pykernels.gpu.plans.gemm import DequantPlan, GemmPlan, GemvMmaPlan, SkinnyPlan
from pykernels.quant import get_format
from pykernels.quant.integer import Integer
from pykernels.testing import relative_error

from .replays import assert_replays_alike
from .test_linear_gpu import made

CASES = [
    ("int4", 1, 40, 384, SkinnyPlan(32, 4), "groups of 32, rows that do not exist"),
    ("int4-g128", 3, 40, 320, SkinnyPlan(16, 2), "half a group at the end"),
    ("int4-g128", 11, 33, 1152, SkinnyPlan(16, 4, 2), "several steps, 16 columns"),
    ("int8", 2, 40, 320, SkinnyPlan(16, 4), "pairs of groups"),
    ("int8-channel", 1, 24, 448, SkinnyPlan(32, 2, 2), "one scale an output"),
    ("fp8", 1, 136, 192, SkinnyPlan(16, 2), "two blocks of scales"),
    ("int8-channel", 4, 24, 832, SkinnyPlan(16, 2, 1, 2), "two steps ahead, beyond the last"),
    ("int4-g128", 5, 72, 1088, DequantPlan(16, 4, 3, 2), "more steps than places"),
    ("int4", 20, 72, 384, DequantPlan(16, 4, 2, 4), "more places than steps, two row blocks"),
    ("int4-g128", 20, 64, 640, DequantPlan(32, 4, 3, 2, 3), "parts: one of them shorter"),
    ("int8-channel", 9, 40, 448, DequantPlan(16, 4, 3, 2), "one scale an output, bytes"),
    ("int8", 9, 40, 448, DequantPlan(16, 4, 3, 2), "groups of 128, bytes, half a group at the end"),
    ("int4", 9, 40, 448, DequantPlan(16, 4, 3, 2), "pairs of groups, an odd one at the end"),
    ("int8-channel", 9, 40, 448, DequantPlan(16, 4, 3, 2, 2), "one scale an output, parts"),
    (
        "q4_k",
        9,
        40,
        768,
        DequantPlan(16, 4, 3, 2, 2),
        "blocks of Q4_K, parts that begin inside one",
    ),
    (
        "q6_k",
        9,
        40,
        768,
        DequantPlan(16, 4, 3, 2, 2),
        "blocks of Q6_K, parts that begin inside one",
    ),
    ("fp8", 9, 136, 448, DequantPlan(16, 4, 3, 2), "two blocks of scales, half of one at the end"),
    ("fp8", 20, 200, 384, DequantPlan(16, 8, 2, 3, 1, 3), "shares of E4M3, rows of two blocks"),
    ("int4-g128", 5, 72, 448, DequantPlan(16, 4, 3, 2, 1, 3), "shares that end inside a tile"),
    ("int8-channel", 20, 100, 192, DequantPlan(16, 4, 2, 3, 1, 3), "whole tiles, then shares"),
    ("int8-channel", 130, 100, 128, DequantPlan(128, 4, 2, 2, 1, 3), "whole tiles in quarters"),
    (
        "q4_k",
        9,
        40,
        768,
        DequantPlan(16, 4, 3, 2, 1, 4),
        "shares of Q4_K that begin inside a block",
    ),
]


@pytest.mark.parametrize(("name", "M", "N", "K", "plan", "why"), CASES, ids=[c[5] for c in CASES])
def test_plans(name: str, M: int, N: int, K: int, plan: Any, why: str, run: Any) -> None:
    check_plan(name, M, N, K, plan, run)


def check_plan(name: str, M: int, N: int, K: int, plan: Any, run: Any) -> None:
    weight, stack = made(name, N, K)
    x, bias = torch.randn(M, K).bfloat16(), torch.randn(N)
    fmt = get_format(name)
    truth = ref.linear(x, weight, bias, fmt=fmt, dtype=torch.float64)
    # The interpreter cuts where a GPU rounds.
    most = 6e-3 if launch.interpreted() else 4e-3
    assert relative_error(run(x, stack, bias, plan).cpu(), truth) < most


@pytest.mark.parametrize(
    "plan",
    [SkinnyPlan(16, 1), SkinnyPlan(16, 2, 2, 2), SkinnyPlan(32, 1, 4), DequantPlan(16, 4, 3, 2)],
    ids=str,
)
def test_bytes_in_groups_of_32(plan: Any, run: Any) -> None:
    """The last step has less than all its chunks."""
    check_bytes_in_groups_of_32(5, 40, 448, plan, run)


def check_bytes_in_groups_of_32(M: int, N: int, K: int, plan: Any, run: Any) -> None:
    """A format that has no name of its own."""
    fmt = Integer("int8 in groups of 32", 8, 32)
    weight = fmt.quantize(torch.randn(N, K) / K**0.5 * torch.rand(N, K))
    x, bias = torch.randn(M, K).bfloat16(), torch.randn(N)
    truth = ref.linear(x, weight, bias, fmt=fmt, dtype=torch.float64)
    y = run(x, pack_for_gpu(fmt, [weight]), bias, plan).cpu()
    assert relative_error(y, truth) < (6e-3 if launch.interpreted() else 4e-3)


def test_every_code_is_decoded(run: Any) -> None:
    """Each code once in a row of its own, times one."""
    for name, count in (("int4", 16), ("int8", 256), ("fp8", 256)):
        stack = empty_for_gpu(get_format(name), 1, count, 128, torch.device("cpu"))
        codes = torch.arange(count, dtype=torch.uint8)
        if name == "fp8":
            codes[codes & 0x7F == 0x7F] = 0  # NaN: no weight is
        stack.data.view(torch.uint8)[:] = (codes * (17 if name == "int4" else 1))[:, None]
        assert stack.scale is not None
        stack.scale.fill_(1.0)
        x = torch.zeros(1, 128)
        x[0, 77] = 1.0
        x = x.bfloat16()
        y = run(x, stack, None, SkinnyPlan(64, 2)).flatten().cpu().float()
        for plan in (GemvMmaPlan(64, 2, 1), DequantPlan(8, 8, 2, 2)):
            assert torch.equal(y, run(x, stack, None, plan).flatten().cpu().float())
        if name == "int4":
            expected = codes.float() - 8
        else:
            kind = torch.int8 if name == "int8" else torch.float8_e4m3fn
            expected = codes.view(kind).float()
        assert torch.equal(y, expected), name


@pytest.mark.parametrize("N", [512, 7168, 18432])
@pytest.mark.parametrize("M", [9, 17, 64, 100, 300, 3000])
def test_no_part_of_many_rows_is_empty(M: int, N: int) -> None:
    for steps in (1, 9, 56, 112):
        for kind in ("int4", "int8"):
            plan = dequant_plan(kind, M, N, steps, 132)
            share = -(-steps // plan.split_k)
            assert -(-steps // share) == plan.split_k
            shared = plan.stages * plan.cols * 128 + plan.word_stages * plan.warps * 1024
            assert shared <= (113 if plan.warps == 4 else 226) * 1024


def test_narrow_matrices_take_more_warps_or_parts() -> None:
    for kind, group in (("int4", 128), ("int4", 32), ("int8", 7168), ("fp8", 128)):
        for M in (1, 16):
            narrow, wide = (skinny_plan(kind, group, M, N, 132) for N in (7168, 18432))
            assert (narrow.warps, wide.warps) == (8, 4)
        for K in (7168, 18432):
            wide = gemv_mma_plan(kind, group, 18432, K, 132)
            assert wide.programs * wide.warps in (3 * 4 * 132, 3 * 8 * 132, 16 * 132)
    for kind in ("q4_k", "q6_k"):
        assert gemv_mma_plan(kind, 0, 18432, 7168, 132) == GemvMmaPlan(16, 4, 2, 3 * 132)
        assert gemv_mma_plan(kind, 0, 18432, 7424, 132).registers == 168
    assert dequant_plan("int8", 64, 7168, 56, 132).split_k == 4
    assert dequant_plan("int8", 3000, 18432, 56, 132).warps == 8


def test_steps_are_shared_evenly_where_shares_are_long() -> None:
    def programs(kind: str, M: int, N: int, steps: int) -> float:
        """A processor."""
        return dequant_plan(kind, M, N, steps, 132).programs / 132

    rows = (16, 32, 64, 128, 256, 512)
    assert [programs("q4_k", M, 18432, 56) for M in rows] == [4, 3, 3, 2, 2, 2]
    assert [programs("int8", M, 7168, 144) for M in rows] == [4, 3, 3, 2, 0, 0]
    assert not any(programs("int8", M, 7168, 56) for M in rows)
    assert [programs("int4", 64, N, 56) for N in (18432, 7168, 4096, 1024)] == [4, 4, 3, 0]
    assert [programs("int8", M, 131072, 56) for M in (64, 256, 4096)] == [0, 0, 0]  # many rounds
    halves = [("int8", 4096, 56), ("int8", 7168, 56), ("int4", 7168, 56), ("q4_k", 7168, 144)]
    assert [dequant_plan(k, 256, N, steps, 132).split_k for k, N, steps in halves] == [2, 1, 2, 2]


def test_which_kernel_takes_which_rows() -> None:
    def found(kind: str, M: int, N: int, capability: tuple[int, int], many: bool = True) -> str:
        return kernel_of(kind, M, N, 7168, 132, capability, many)

    assert found("int8", 1, 7168, (9, 0)) == "gemv"
    assert found("int8", 1, 18432, (9, 0)) == found("fp8", 1, 7168, (8, 0)) == "one"
    assert found("q4_k", 1, 18432, (8, 0)) == "one" and found("q4_k", 2, 18432, (8, 0)) == "few_k"
    assert found("int8", 2, 7168, (9, 0)) == "few"
    assert kernel_of("int4", 1, 7168, 65536, 132, (9, 0), True) == "few"  # too long for gemv_mma
    assert kernel_of("q4_k", 1, 7168, 65536, 132, (9, 0), True) == "few_k"
    assert found("int4", 17, 7168, (9, 0)) == found("int8", 9, 7168, (9, 0)) == "many"
    assert found("int8", 9, 2048, (9, 0)) == found("int8", 9, 7168, (8, 0)) == "few"
    assert kernel_of("int8", 9, 7168, 7168, 132, (9, 0), True, group=32) == "few"
    assert found("int4", 17, 7168, (9, 0), many=False) == found("int4", 32, 7168, (8, 0)) == "few"
    assert found("int4", 33, 7168, (8, 0)) == found("q4_k", 9, 7168, (9, 0), False) == "linear"
    assert found("q4_k", 8, 7168, (8, 0), False) == found("q6_k", 2, 7168, (9, 0), False) == "few_k"
    assert found("q4_k", 1, 7168, (0, 0), False) == "linear"
    assert found("int4", 1, 7168, (0, 0)) == "linear"  # the interpreter
    rows = (4, 5, 1500, 1501)
    assert [found("fp8", M, 7168, (9, 0)) for M in (16, *rows[2:])] == ["few", "many", "linear"]
    assert [found("q6_k", M, 7168, (9, 0)) for M in rows] == ["few_k", "many", "many", "linear"]


def test_the_interpreter_goes_by_the_decoding_gemm(device: torch.device) -> None:
    if not launch.interpreted():
        pytest.skip("for the interpreter")
    stack = made("int4", 72, 384)[1]
    assert isinstance(select(stack, 1, device), GemmPlan)
    for plan in (GemvMmaPlan(16, 4), SkinnyPlan(16, 4), DequantPlan(16)):
        with pytest.raises(PykernelsError, match="no kernel for that plan"):
            linear(torch.zeros(1, 384).bfloat16(), stack, plan=plan)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["int4-g128", "int8-channel"])
def test_a_chain_of_linears_waits_for_what_it_reads(name: str) -> None:
    """A launch may begin before the one in front of it has ended; it reads nothing until then."""
    device = torch.device("cuda")
    stack = made(name, 2048, 2048)[1].to(device)
    x = torch.randn(1, 2048, device=device).bfloat16()

    def chain(wait: bool) -> torch.Tensor:
        y = x
        for i in range(24):
            y = linear(y, stack, plan=SkinnyPlan(32, 4) if i % 3 else None)
            if wait:
                torch.cuda.synchronize()
        return y

    slow = chain(True)
    assert slow.isfinite().all() and slow.abs().max() > 0
    assert_replays_alike(lambda: chain(False), slow, times=5)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["int4-g128", "int8-channel", "q4_k"])
def test_linears_wait_for_kernels_that_let_them_begin(name: str) -> None:
    """Those behind RMSNorm and SiLU*mul begin with them; all write to the same buffers again."""
    device = torch.device("cuda")
    gate_up, down = (made(name, N, 2048)[1].to(device) for N in (4096, 2048))
    x = torch.randn(1, 2048, device=device).bfloat16()
    weight = torch.rand(2048, device=device).bfloat16() + 0.5
    total, normed, half, y = (torch.empty_like(x) for _ in range(4))
    wide = torch.empty(1, 4096, dtype=torch.bfloat16, device=device)

    def chain(wait: bool) -> torch.Tensor:
        total.copy_(x)
        y.zero_()
        for _ in range(12):
            rms_norm(y, weight, 1e-6, total, out=(normed, total))
            for step in (
                lambda: linear(normed, gate_up, out=wide),
                lambda: silu_mul(wide, out=half),
                lambda: linear(half, down, out=y),
            ):
                if wait:
                    torch.cuda.synchronize()
                step()
            if wait:
                torch.cuda.synchronize()
        return y.clone()

    slow = chain(True)
    assert slow.isfinite().all() and slow.abs().max() > 0
    assert_replays_alike(lambda: chain(False), slow, times=50)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["int4-g128", "int4", "int8-channel", "fp8", "q4_k", "q6_k"])
@pytest.mark.parametrize("rows", [16, 32, 64, 128, 256])
def test_shared_steps_have_the_same_bits_each_time(name: str, rows: int, run: Any) -> None:
    """Of all tiles, or of the last ones behind whole ones; replayed too."""
    weight, stack = made(name, 8264, 1024)
    stack = stack.to("cuda")
    plan = dequant_plan("int8", rows, 18432, 56, 132)
    assert plan.programs
    fmt = get_format(name)
    for M in (rows - 3, 514):
        x = torch.randn(M, 1024).bfloat16()
        truth = ref.linear(x, weight, fmt=fmt)
        x = x.cuda()
        first = run(x, stack, None, plan)
        assert relative_error(first.cpu(), truth) < 4e-3
        out = torch.empty_like(first)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            linear(x, stack, plan=plan, out=out)
        for _ in range(20):
            assert torch.equal(run(x, stack, None, plan), first)
            out.fill_(float("nan"))
            graph.replay()
            assert torch.equal(out, first)


def meta_call(
    name: str, M: int, N: int, activations: str = "bf16", K: int = 7168
) -> tuple[str, object]:
    stack = empty_for_gpu(get_format(name), 1, N, K, torch.device("meta"))
    x = torch.empty(M, K, dtype=torch.bfloat16, device="meta")
    bias = torch.empty(N, device="meta") if activations == "fp8" else None
    return f"{name} {M} {N}x{K}", lambda: linear(x, stack, bias, activations=activations)


COMPILES = [
    meta_call("q4_k", 4, 18432),
    meta_call("q6_k", 2, 7168),
    meta_call("int4-g128", 2, 18432),
    meta_call("int8-channel", 8, 7168),
    meta_call("q4_k", 8, 7168),
    meta_call("q6_k", 8, 7168),
    meta_call("int4-g128", 32, 7168),
    meta_call("int4-g128", 64, 7168),
    meta_call("int4-g128", 128, 18432),
    meta_call("q4_k", 16, 18432),
    meta_call("q6_k", 32, 18432),
    meta_call("int4", 64, 18432),
    meta_call("int4", 128, 18432),
    meta_call("q6_k", 256, 18432),
    meta_call("fp8", 2048, 7168),
    meta_call("fp8", 32, 18432),
    meta_call("fp8", 64, 18432),
    meta_call("fp8", 64, 4096),
    meta_call("fp8", 128, 18432),
    meta_call("fp8", 256, 18432),
    meta_call("int8-channel", 128, 18432),
    meta_call("int4-g128", 2048, 18432),
    meta_call("int4-g128", 2048, 7168),
    meta_call("int8-channel", 2048, 7168),
    meta_call("fp8", 128, 2048, activations="fp8"),
    meta_call("fp8", 2048, 18432, activations="fp8"),
]
