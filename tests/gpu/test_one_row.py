"""``gemv_mma``: its plans, formats and edges, interpreted on any CPU and compiled on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pykernels import ref
from pykernels.errors import PykernelsError
from pykernels.gpu.gemm.linear import linear
from pykernels.gpu.gemm.select import gemv_mma_plan
from pykernels.gpu.plans.gemm import GemvMmaPlan
from pykernels.quant import get_format
from pykernels.testing import relative_error

from .test_linear_gpu import made
from .test_linear_rows import check_bytes_in_groups_of_32, check_plan, meta_call

CASES = [
    ("int4-g128", 1, 40, 1344, GemvMmaPlan(16, 2, 2, 2), "half a group at the end"),
    ("int4", 1, 40, 832, GemvMmaPlan(32, 4), "groups of 32, rows that do not exist"),
    ("int8", 1, 40, 704, GemvMmaPlan(16, 2, 3, 1), "groups of 128, two chunks each"),
    ("int4", 1, 40, 1600, GemvMmaPlan(16, 4, 3, 2, 168), "groups of 32, several blocks"),
    ("int8-channel", 1, 72, 704, GemvMmaPlan(16, 2, 3, 2), "one scale an output"),
    ("fp8", 1, 136, 192, GemvMmaPlan(16, 2, 1), "two blocks of scales"),
    (
        "int4-g128",
        1,
        40,
        4160,
        GemvMmaPlan(16, 16, 2, 2, 128),
        "batches of inputs, nibbles",
    ),
    ("int8-channel", 1, 40, 4160, GemvMmaPlan(16, 16, 3, 2), "batches of inputs"),
    (
        "int4-g128",
        1,
        40,
        1344,
        GemvMmaPlan(32, 8, 1, 0, 128),
        "32 rows, a partial last step",
    ),
    ("int4", 1, 40, 1600, GemvMmaPlan(32, 8, 2, 0, 128), "32 rows, groups of 32"),
    ("int4-g128", 1, 72, 1344, GemvMmaPlan(32, 2, 2, used=28), "28 rows of 32, one left"),
    (
        "fp8",
        1,
        136,
        1600,
        GemvMmaPlan(16, 4, 2, 3, used=13),
        "13 rows of 16, several blocks",
    ),
    (
        "int8-channel",
        1,
        40,
        8384,
        GemvMmaPlan(16, 2, 3, used=15),
        "more steps than are written out",
    ),
    ("int4-g128", 1, 40, 5440, GemvMmaPlan(16, 1, 2, 2), "so many, and several blocks"),
    ("fp8", 1, 136, 1600, GemvMmaPlan(16, 4, 3, 0, 128), "three steps of E4M3 ahead"),
    ("int4-g128", 1, 24, 6208, GemvMmaPlan(16, 8, 3, 0, 128), "8 warps, batches of steps"),
    ("q4_k", 1, 40, 768, GemvMmaPlan(16, 2, 2, 2), "blocks of Q4_K, several of rows"),
    ("q4_k", 1, 72, 1280, GemvMmaPlan(32, 8, 1, 0, 128, 28), "Q4_K, a partial last step"),
    ("q4_k", 1, 40, 5376, GemvMmaPlan(16, 2, 3), "Q4_K, batches of inputs"),
    ("q6_k", 1, 40, 768, GemvMmaPlan(16, 2, 2, 2), "blocks of Q6_K, several of rows"),
    *(
        (name, 1, 40, K, GemvMmaPlan(16, 4, 2, 2, used=13), f"{name} in a loop")
        for name, K in (("q4_k", 2304), ("q6_k", 2304), ("int4", 2240))
    ),
    ("q6_k", 1, 72, 1280, GemvMmaPlan(32, 8, 1, 0, 128, 28), "Q6_K, a partial last step"),
    ("q6_k", 1, 40, 5376, GemvMmaPlan(16, 2, 3), "Q6_K, batches of inputs"),
]


@pytest.mark.parametrize(("name", "M", "N", "K", "plan", "why"), CASES, ids=[c[5] for c in CASES])
def test_plans(name: str, M: int, N: int, K: int, plan: Any, why: str, run: Any) -> None:
    check_plan(name, M, N, K, plan, run)


@pytest.mark.parametrize("plan", [GemvMmaPlan(16, 4, 2), GemvMmaPlan(32, 2, 1, 1)])
def test_one_row_of_bytes_in_groups_of_32(plan: GemvMmaPlan, run: Any) -> None:
    """The last step has less than all its chunks."""
    check_bytes_in_groups_of_32(1, 72, 704, plan, run)


@pytest.mark.parametrize("name", ["int8", "int4", "q4_k", "q6_k"])
@pytest.mark.parametrize("size", [2.0**-40, 2.0**50])
def test_one_row_of_any_size(size: float, name: str, run: Any) -> None:
    """Codes are multiplied as subnormal numbers; what is no number stays none."""
    weight, stack = made(name, 16, 768)
    x = (torch.randn(1, 768) * size).bfloat16()
    truth = ref.linear(x, weight, fmt=get_format(name), dtype=torch.float64)
    y = run(x, stack, None, GemvMmaPlan(16, 4, 1)).cpu()
    assert relative_error(y.double() / size, truth / size) < 6e-3
    x[0, 100] = float("inf")
    assert not run(x, stack, None, GemvMmaPlan(16, 4, 1)).isfinite().any()


@pytest.mark.parametrize("name", ["q4_k", "q6_k"])
def test_one_row_of_k_quants_takes_two_warps(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pykernels.gpu.gemm.linear.arch", lambda device: (9, 0))
    _, stack = made(name, 16, 768)
    with pytest.raises(PykernelsError, match="two warps or more"):
        linear(torch.zeros(1, 768).bfloat16().to(device), stack.to(device), plan=GemvMmaPlan(16, 1))


def test_one_row_of_narrow_matrices() -> None:
    """(rows, of them used, warps, steps ahead) by N: fewer blocks of 32 rows than processors, or as
    many."""

    def found(kind: str, group: int, K: int) -> list[tuple[int, int, int, int]]:
        plans = [gemv_mma_plan(kind, group, N, K, 132) for N in (1536, 4096, 7168, 12671)]
        assert all((plan.programs, plan.registers) == (0, 128) for plan in plans)
        assert plans[0] == plans[1] and plans[2] == replace(plans[3], used=plans[2].used)
        return [(plan.rows, plan.used, plan.warps, plan.ahead) for plan in plans[1:3]]

    assert found("int4", 128, 7168) == [(16, 0, 8, 3), (32, 28, 8, 1)]
    assert found("int4", 128, 4096) == [(16, 0, 8, 2), (32, 28, 8, 1)]
    assert found("int4", 32, 7168) == [(16, 0, 8, 3), (32, 28, 8, 1)]
    assert found("int4", 32, 18432) == [(16, 0, 8, 2), (32, 28, 8, 1)]
    assert found("q4_k", 0, 7168) == [(16, 0, 8, 2), (16, 14, 4, 2)]
    assert found("q4_k", 0, 18432) == [(16, 0, 8, 1), (16, 14, 4, 2)]
    assert found("q6_k", 0, 7168) == [(16, 0, 8, 2), (16, 14, 4, 2)]
    assert found("q6_k", 0, 18432) == [(16, 0, 8, 1), (16, 14, 8, 2)]
    assert found("fp8", 128, 4096) == [(16, 0, 8, 3), (16, 14, 4, 4)]
    assert found("fp8", 128, 18432) == [(16, 0, 8, 3), (16, 14, 4, 3)]
    first = 32 * 132  # one block of 32 rows a processor
    for kind, warps in (("int4", 8), ("fp8", 4)):
        less, enough = (gemv_mma_plan(kind, 128, N, 7168, 132) for N in (first - 1, first))
        assert (less.rows, less.warps) == (16, 8)
        assert (enough.rows, enough.warps) == (32 if kind == "int4" else 16, warps)


def test_blocks_of_one_row_fill_their_places() -> None:
    """Two programs of 8 warps a processor, or four of 4: none has many blocks more than others."""
    for kind, room in (("int4", 2 * 132), ("fp8", 4 * 132)):
        for N in range(32 * 132, 96 * 132, 37):
            plan = gemv_mma_plan(kind, 128, N, 7168, 132)
            whole = -(-N // plan.rows)
            rounds = -(-whole // room)
            if plan.used:
                blocks = -(-N // plan.used)
                assert 3 * plan.rows <= 4 * plan.used <= 4 * plan.rows
                assert 0.9 * rounds * room < blocks <= rounds * room
            else:  # filled places would hold too few rows
                assert 4 * -(-N // (rounds * room)) < 3 * plan.rows
    used = [gemv_mma_plan("int4", 128, N, 7168, 132).used for N in (5120, 6336, 7168, 8192, 8448)]
    assert used == [0, 24, 28, 32, 32]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("int4-g128", GemvMmaPlan(16, 4)),
        ("int4-g128", GemvMmaPlan(16, 4, 4, 132, 160)),
        ("int4", GemvMmaPlan(16, 4, 3, 132, 168)),
        ("int8-channel", GemvMmaPlan(16, 4)),
        ("int8-channel", GemvMmaPlan(16, 16, 3, 132, 128)),
    ],
)
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
    meta_call("int4-g128", 1, 18432),
    meta_call("int4-g128", 1, 7168),
    meta_call("int4", 1, 7168),
    meta_call("int4", 1, 18432),
    meta_call("q4_k", 1, 7168),
    meta_call("q6_k", 1, 7168),
    meta_call("q6_k", 1, 18432),
    meta_call("q4_k", 1, 2048),
    *(meta_call(name, 1, 7168, K=11008) for name in ("q4_k", "q6_k", "int4")),  # no whole steps
    *(meta_call(name, 1, 18432, K=7424) for name in ("q4_k", "q6_k")),
    meta_call("fp8", 1, 7168),
    meta_call("q4_k", 1, 18432),
    meta_call("int8-channel", 1, 18432),
]
