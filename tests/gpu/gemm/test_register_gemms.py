"""GEMMs that dequantize in registers: ``gemv_mma``, ``skinny_linear`` and ``dequant_gemm``.

Compiled on a GPU that has them, on any CPU by the Gluon interpreter.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pykernels import ref
from pykernels.gpu.common import launch
from pykernels.gpu.gemm.linear import linear
from pykernels.gpu.gemm.weights import empty_for_gpu, pack_for_gpu
from pykernels.gpu.plans.gemm import DequantPlan, GemvMmaPlan, SkinnyPlan
from pykernels.gpu.plans.registers import dequant_plan
from pykernels.quant import get_format
from pykernels.quant.integer import Integer
from pykernels.testing import relative_error

from ..replays import assert_replays_alike
from .test_linear import made, meta_call

# format, rows, outputs, inputs, plan, why
CASES = [
    ("int4", 1, 40, 384, SkinnyPlan(32, 4), "groups of 32, rows that do not exist"),
    ("int4-g128", 3, 40, 320, SkinnyPlan(16, 2), "half a group at the end"),
    ("int4-g128", 11, 33, 1152, SkinnyPlan(16, 4, 2), "several steps, 16 columns"),
    ("int8", 2, 40, 320, SkinnyPlan(16, 4), "pairs of groups"),
    ("int8-channel", 1, 24, 448, SkinnyPlan(32, 2, 2), "one scale an output"),
    ("fp8", 1, 136, 192, SkinnyPlan(16, 2), "two blocks of scales"),
    ("int8-channel", 4, 24, 832, SkinnyPlan(16, 2, 1, 2), "two steps ahead, beyond the last"),
    ("int4-g128", 5, 72, 1088, DequantPlan(16, 4, 3, 2), "more steps than stages"),
    ("int4", 20, 72, 384, DequantPlan(16, 4, 2, 4), "more stages than steps, two row blocks"),
    ("int4-g128", 20, 64, 640, DequantPlan(32, 4, 3, 2, 3), "split K, one part shorter"),
    ("int8-channel", 9, 40, 448, DequantPlan(16, 4, 3, 2), "one scale an output, bytes"),
    ("int8", 9, 40, 448, DequantPlan(16, 4, 3, 2), "groups of 128, half a group at the end"),
    ("int4", 9, 40, 448, DequantPlan(16, 4, 3, 2), "pairs of groups, an odd one at the end"),
    ("q4_k", 9, 40, 768, DequantPlan(16, 4, 3, 2, 2), "Q4_K, parts begin inside a superblock"),
    ("q6_k", 9, 40, 768, DequantPlan(16, 4, 3, 2, 2), "Q6_K, parts begin inside a superblock"),
    ("fp8", 9, 136, 448, DequantPlan(16, 4, 3, 2), "two blocks of scales, half of one at the end"),
    ("int4-g128", 5, 72, 448, DequantPlan(16, 4, 3, 2, 1, 3), "shares that end inside a tile"),
    ("int8-channel", 20, 100, 192, DequantPlan(16, 4, 2, 3, 1, 3), "whole tiles, then shares"),
    ("int8-channel", 130, 100, 128, DequantPlan(128, 4, 2, 2, 1, 3), "whole tiles in quarters"),
    ("q4_k", 9, 40, 768, DequantPlan(16, 4, 3, 2, 1, 4), "shares begin inside a superblock"),
    ("int4-g128", 1, 40, 1344, GemvMmaPlan(16, 2, 2, 2), "gemv, half a group at the end"),
    ("int4", 1, 40, 832, GemvMmaPlan(32, 4), "gemv, rows that do not exist"),
    ("int8", 1, 40, 704, GemvMmaPlan(16, 2, 3, 1), "gemv, two chunks a group"),
    ("int8-channel", 1, 72, 704, GemvMmaPlan(16, 2, 3, 2), "gemv, one scale an output"),
    ("fp8", 1, 136, 192, GemvMmaPlan(16, 2, 1), "gemv, two blocks of scales"),
    ("int4-g128", 1, 40, 4160, GemvMmaPlan(16, 16, 2, 2, 128), "gemv, batches of inputs, nibbles"),
    ("int4-g128", 1, 72, 1344, GemvMmaPlan(32, 2, 2, used=28), "gemv, 28 rows of 32, one left"),
    ("int8-channel", 1, 40, 8384, GemvMmaPlan(16, 2, 3, used=15), "gemv, a loop over many steps"),
    ("int4-g128", 1, 40, 5440, GemvMmaPlan(16, 1, 2, 2), "gemv, one warp, several blocks"),
    ("q4_k", 1, 40, 768, GemvMmaPlan(16, 2, 2, 2), "gemv, Q4_K, several blocks of rows"),
    ("q4_k", 1, 72, 1280, GemvMmaPlan(32, 8, 1, 0, 128, 28), "gemv, Q4_K, a partial last step"),
    ("q4_k", 1, 40, 2304, GemvMmaPlan(16, 4, 2, 2, used=13), "gemv, Q4_K in a loop"),
    ("q6_k", 1, 40, 768, GemvMmaPlan(16, 2, 2, 2), "gemv, Q6_K, several blocks of rows"),
]
MOST = 6e-3 if launch.interpreted() else 4e-3
"""Relative error: the interpreter cuts where a GPU rounds."""


@pytest.mark.parametrize(("name", "M", "N", "K", "plan", "why"), CASES, ids=[c[5] for c in CASES])
def test_plans(name: str, M: int, N: int, K: int, plan: Any, why: str, run: Any) -> None:
    weight, stack = made(name, N, K)
    x, bias = torch.randn(M, K).bfloat16(), torch.randn(N)
    truth = ref.linear(x, weight, bias, fmt=get_format(name), dtype=torch.float64)
    assert relative_error(run(x, stack, bias, plan).cpu(), truth) < MOST


BYTES = [
    (5, 448, SkinnyPlan(16, 2, 2, 2)),
    (5, 448, DequantPlan(16, 4, 3, 2)),
    (1, 704, GemvMmaPlan(16, 4, 2)),
]


@pytest.mark.parametrize(("M", "K", "plan"), BYTES, ids=str)
def test_bytes_in_groups_of_32(M: int, K: int, plan: Any, run: Any) -> None:
    """A format that has no name of its own; the last step has less than all its chunks."""
    fmt = Integer("int8 in groups of 32", 8, 32)
    weight = fmt.quantize(torch.randn(40, K) / K**0.5 * torch.rand(40, K))
    x, bias = torch.randn(M, K).bfloat16(), torch.randn(40)
    truth = ref.linear(x, weight, bias, fmt=fmt, dtype=torch.float64)
    assert relative_error(run(x, pack_for_gpu(fmt, [weight]), bias, plan).cpu(), truth) < MOST


@pytest.mark.parametrize("name", ["int8", "q6_k"])
@pytest.mark.parametrize("size", [2.0**-40, 2.0**50])
def test_gemv_mma_of_inputs_of_any_size(size: float, name: str, run: Any) -> None:
    """Codes are multiplied as subnormal numbers; what is no number stays none."""
    weight, stack = made(name, 16, 768)
    x = (torch.randn(1, 768) * size).bfloat16()
    truth = ref.linear(x, weight, fmt=get_format(name), dtype=torch.float64)
    y = run(x, stack, None, GemvMmaPlan(16, 4, 1)).cpu()
    assert relative_error(y.double() / size, truth / size) < 6e-3
    x[0, 100] = float("inf")
    assert not run(x, stack, None, GemvMmaPlan(16, 4, 1)).isfinite().any()


def test_every_code_is_dequantized(run: Any) -> None:
    """Each code once in a row of its own, times one."""
    for name, count in (("int4", 16), ("int8", 256), ("fp8", 256)):
        stack = empty_for_gpu(get_format(name), 1, count, 128, torch.device("cpu"))
        codes = torch.arange(count, dtype=torch.uint8)
        if name == "fp8":
            codes[codes & 0x7F == 0x7F] = 0  # NaN: no weight is
        stack.data.view(torch.uint8)[:] = (codes * (17 if name == "int4" else 1))[:, None]
        stack.scale.fill_(1.0)
        x = torch.eye(128)[77:78].bfloat16()
        y = run(x, stack, None, SkinnyPlan(64, 2)).flatten().cpu().float()
        for plan in (GemvMmaPlan(64, 2, 1), DequantPlan(8, 8, 2, 2)):
            assert torch.equal(y, run(x, stack, None, plan).flatten().cpu().float())
        kind = torch.float8_e4m3fn if name == "fp8" else torch.int8
        expected = codes.view(kind).float() - (8 if name == "int4" else 0)
        assert torch.equal(y, expected), name


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["int4-g128", "int4", "int8-channel", "fp8", "q4_k", "q6_k"])
@pytest.mark.parametrize("rows", [16, 32, 64, 128, 256])
def test_stream_k_has_the_same_bits_each_time(name: str, rows: int, run: Any) -> None:
    """Shares of all tiles, or of the last ones behind whole ones; replayed too."""
    weight, stack = made(name, 8264, 1024)
    stack = stack.to("cuda")
    plan = dequant_plan("int8", rows, 18432, 56, 132)
    assert plan.num_ctas
    for M in (rows - 3, 514):
        x = torch.randn(M, 1024).bfloat16()
        truth = ref.linear(x, weight, fmt=get_format(name))
        x = x.cuda()
        first = run(x, stack, None, plan)
        assert relative_error(first.cpu(), truth) < 4e-3
        assert_replays_alike(lambda x=x: linear(x, stack, plan=plan), first, times=20)


IN_FRONT = [
    ("int4-g128", GemvMmaPlan(16, 4, 4, 132, 160)),
    ("int4", GemvMmaPlan(16, 4, 3, 132, 168)),
    ("int8-channel", GemvMmaPlan(16, 4)),
    ("int8-channel", GemvMmaPlan(16, 16, 3, 132, 128)),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "plan"), IN_FRONT)
def test_weights_may_be_written_by_the_kernel_in_front(name: str, plan: GemvMmaPlan) -> None:
    device = torch.device("cuda")
    stack = made(name, 4096, 4096)[1].to(device)
    x = torch.randn(1, 4096, device=device).bfloat16()
    codes = stack.data.view(torch.int32)
    expected = []
    for _ in range(2):
        torch.bitwise_not(codes, out=codes)
        torch.cuda.synchronize()
        expected.append(linear(x, stack, plan=plan))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = []
        for _ in range(16):
            torch.bitwise_not(codes, out=codes)
            outs.append(linear(x, stack, plan=plan))
    for _ in range(20):
        graph.replay()
        for i, out in enumerate(outs):
            assert torch.equal(out, expected[i % 2])


COMPILES = [
    *(
        meta_call(*sizes)
        for sizes in (
            ("int4-g128", 1, 7168),
            ("int4", 1, 7168),
            ("q4_k", 1, 18432),
            ("q6_k", 1, 18432),
            ("int8-channel", 1, 18432),
            ("q6_k", 2, 7168),
            ("int4-g128", 2, 18432),
            ("int8-channel", 8, 7168),
            ("int4", 64, 18432),
            ("q6_k", 32, 18432),
            ("fp8", 64, 4096),
            ("int4-g128", 2048, 7168),
            ("int8-channel", 2048, 7168),
            ("fp8", 2048, 7168),
            ("fp8", 128, 2048, "fp8"),
        )
    ),
]
COMPILES_ON_A_GPU = [
    *(
        meta_call(*sizes)
        for sizes in (
            ("int4-g128", 1, 18432),
            ("int4-g128", 2048, 18432),
            ("int4-g128", 128, 18432),
            ("int4-g128", 32, 7168),
            ("int4-g128", 64, 7168),
            ("int4", 1, 18432),
            ("int4", 128, 18432),
            ("int8-channel", 128, 18432),
            ("fp8", 1, 7168),
            ("fp8", 32, 18432),
            ("fp8", 64, 18432),
            ("fp8", 128, 18432),
            ("fp8", 256, 18432),
            ("fp8", 2048, 18432, "fp8"),
            ("q4_k", 4, 18432),
            ("q4_k", 8, 7168),
            ("q4_k", 16, 18432),
            ("q6_k", 8, 7168),
            ("q6_k", 256, 18432),
        )
    ),
    *(meta_call(name, 1, N) for name in ("q4_k", "q6_k") for N in (2048, 7168)),
    *(meta_call(name, 1, 7168, K=11008) for name in ("q4_k", "q6_k", "int4")),  # no whole steps
    *(meta_call(name, 1, 18432, K=7424) for name in ("q4_k", "q6_k")),
]
