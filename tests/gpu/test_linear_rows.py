"""Linears whose weights are decoded in registers: the kernels on a GPU, on any CPU by the shim."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pykernels import ref
from pykernels.errors import PykernelsError
from pykernels.gpu import few_rows, launch, many_rows_hopper, one_row
from pykernels.gpu.activation import silu_mul
from pykernels.gpu.linear import linear
from pykernels.gpu.linear_plan import choose_plan, few_plan, kernel_of, many_plan, one_row_plan
from pykernels.gpu.matrices import empty_for_gpu, pack_for_gpu
from pykernels.gpu.norm import rms_norm
from pykernels.gpu.plan_types import FewPlan, GemmPlan, ManyPlan, OneRowPlan
from pykernels.quant import get_format
from pykernels.quant.integer import Integer
from pykernels.testing import relative_error

from .replays import assert_replays_alike
from .test_linear_gpu import made


@pytest.fixture
def run(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Any:
    """(x, stack, bias, plan) -> bfloat16 [M, N], by the plan's own kernel."""
    if launch.interpreted():
        from triton.tools.tensor_descriptor import TensorDescriptor

        from .gluon_shim import interpreted

        class Descriptor:
            @staticmethod
            def from_tensor(tensor: torch.Tensor, block: list[int], layout: object) -> Any:
                return TensorDescriptor.from_tensor(tensor, block)

        for module in (few_rows, one_row, many_rows_hopper):
            name = module.__name__.rsplit(".", 1)[1]
            monkeypatch.setattr(module, name, interpreted(getattr(module, name)))
        monkeypatch.setattr(many_rows_hopper, "TensorDescriptor", Descriptor)

        def poisoned(*shape: int, **how: Any) -> torch.Tensor:
            return torch.full(shape, float("nan"), **how)

        monkeypatch.setattr(many_rows_hopper, "_scratch", poisoned)
    elif torch.cuda.get_device_capability(device) < (9, 0):
        pytest.skip("Hopper's")

    def call(x: torch.Tensor, stack: Any, bias: Any, plan: Any) -> torch.Tensor:
        x, stack = x.to(device), stack.to(device)
        bias = None if bias is None else bias.to(device)
        out = torch.full((x.shape[0], stack.N), float("nan"), dtype=torch.bfloat16, device=device)
        if not launch.interpreted():
            return linear(x, stack, bias, plan=plan, out=out)
        if isinstance(plan, OneRowPlan):
            one_row.multiply_one_row(x, stack, out, bias, plan)
            return out
        if isinstance(plan, FewPlan):
            few_rows.multiply_few_rows(x, stack, out, bias, plan)
            return out
        many_rows_hopper.multiply_many_rows(x, stack, out, bias, plan)
        return out

    return call


CASES = [
    ("int4", 1, 40, 384, FewPlan(32, 4), "groups of 32, rows that do not exist"),
    ("int4-g128", 3, 40, 320, FewPlan(16, 2), "half a group at the end"),
    ("int4-g128", 11, 33, 1152, FewPlan(16, 4, 2), "several steps, 16 columns"),
    ("int8", 2, 40, 320, FewPlan(16, 4), "pairs of groups"),
    ("int8-channel", 1, 24, 448, FewPlan(32, 2, 2), "one scale an output"),
    ("fp8", 1, 136, 192, FewPlan(16, 2), "two blocks of scales"),
    ("int8-channel", 4, 24, 832, FewPlan(16, 2, 1, 2), "two steps ahead, beyond the last"),
    ("int4-g128", 1, 40, 1344, OneRowPlan(16, 2, 2, 2), "one row: half a group at the end"),
    ("int4", 1, 40, 832, OneRowPlan(32, 4), "one row: groups of 32, rows that do not exist"),
    ("int8", 1, 40, 704, OneRowPlan(16, 2, 3, 1), "one row: groups of 128, two chunks each"),
    ("int4", 1, 40, 1600, OneRowPlan(16, 4, 3, 2, 168), "one row: groups of 32, several blocks"),
    ("int8-channel", 1, 72, 704, OneRowPlan(16, 2, 3, 2), "one row: one scale an output"),
    ("fp8", 1, 136, 192, OneRowPlan(16, 2, 1), "one row: two blocks of scales"),
    (
        "int4-g128",
        1,
        40,
        4160,
        OneRowPlan(16, 16, 2, 2, 128),
        "one row: batches of inputs, nibbles",
    ),
    ("int8-channel", 1, 40, 4160, OneRowPlan(16, 16, 3, 2), "one row: batches of inputs"),
    (
        "int4-g128",
        1,
        40,
        1344,
        OneRowPlan(32, 8, 1, 0, 128),
        "one row: 32 rows, a partial last step",
    ),
    ("int4", 1, 40, 1600, OneRowPlan(32, 8, 2, 0, 128), "one row: 32 rows, groups of 32"),
    ("int4-g128", 1, 72, 1344, OneRowPlan(32, 2, 2, used=28), "one row: 28 rows of 32, one left"),
    (
        "fp8",
        1,
        136,
        1600,
        OneRowPlan(16, 4, 2, 3, used=13),
        "one row: 13 rows of 16, several blocks",
    ),
    (
        "int8-channel",
        1,
        40,
        8384,
        OneRowPlan(16, 2, 3, used=15),
        "one row: more steps than are written out",
    ),
    ("int4-g128", 1, 40, 5440, OneRowPlan(16, 1, 2, 2), "one row: so many, and several blocks"),
    ("fp8", 1, 136, 1600, OneRowPlan(16, 4, 3, 0, 128), "one row: three steps of E4M3 ahead"),
    ("int4-g128", 1, 24, 6208, OneRowPlan(16, 8, 3, 0, 128), "one row: 8 warps, batches of steps"),
    ("q4_k", 1, 40, 768, OneRowPlan(16, 2, 2, 2), "one row: blocks of Q4_K, several of rows"),
    ("q4_k", 1, 72, 1280, OneRowPlan(32, 8, 1, 0, 128, 28), "one row: Q4_K, a partial last step"),
    ("q4_k", 1, 40, 5376, OneRowPlan(16, 2, 3), "one row: Q4_K, batches of inputs"),
    ("q6_k", 1, 40, 768, OneRowPlan(16, 2, 2, 2), "one row: blocks of Q6_K, several of rows"),
    *(
        (name, 1, 40, K, OneRowPlan(16, 4, 2, 2, used=13), f"one row: {name} in a loop")
        for name, K in (("q4_k", 2304), ("q6_k", 2304), ("int4", 2240))
    ),
    ("q6_k", 1, 72, 1280, OneRowPlan(32, 8, 1, 0, 128, 28), "one row: Q6_K, a partial last step"),
    ("q6_k", 1, 40, 5376, OneRowPlan(16, 2, 3), "one row: Q6_K, batches of inputs"),
    ("int4-g128", 5, 72, 1088, ManyPlan(16, 4, 3, 2), "more steps than places"),
    ("int4", 20, 72, 384, ManyPlan(16, 4, 2, 4), "more places than steps, two row blocks"),
    ("int4-g128", 20, 64, 640, ManyPlan(32, 4, 3, 2, 3), "parts: one of them shorter"),
    ("int8-channel", 9, 40, 448, ManyPlan(16, 4, 3, 2), "one scale an output, bytes"),
    ("int8", 9, 40, 448, ManyPlan(16, 4, 3, 2), "groups of 128, bytes, half a group at the end"),
    ("int4", 9, 40, 448, ManyPlan(16, 4, 3, 2), "pairs of groups, an odd one at the end"),
    ("int8-channel", 9, 40, 448, ManyPlan(16, 4, 3, 2, 2), "one scale an output, parts"),
    ("q4_k", 9, 40, 768, ManyPlan(16, 4, 3, 2, 2), "blocks of Q4_K, parts that begin inside one"),
    ("q6_k", 9, 40, 768, ManyPlan(16, 4, 3, 2, 2), "blocks of Q6_K, parts that begin inside one"),
    ("fp8", 9, 136, 448, ManyPlan(16, 4, 3, 2), "two blocks of scales, half of one at the end"),
    ("fp8", 20, 200, 384, ManyPlan(16, 8, 2, 3, 1, 3), "shares of E4M3, rows of two blocks"),
    ("int4-g128", 5, 72, 448, ManyPlan(16, 4, 3, 2, 1, 3), "shares that end inside a tile"),
    ("int8-channel", 20, 100, 192, ManyPlan(16, 4, 2, 3, 1, 3), "whole tiles, then shares"),
    ("int8-channel", 130, 100, 128, ManyPlan(128, 4, 2, 2, 1, 3), "whole tiles in quarters"),
    ("q4_k", 9, 40, 768, ManyPlan(16, 4, 3, 2, 1, 4), "shares of Q4_K that begin inside a block"),
]


@pytest.mark.parametrize(("name", "M", "N", "K", "plan", "why"), CASES, ids=[c[5] for c in CASES])
def test_plans(name: str, M: int, N: int, K: int, plan: Any, why: str, run: Any) -> None:
    weight, stack = made(name, N, K)
    x, bias = torch.randn(M, K).bfloat16(), torch.randn(N)
    fmt = get_format(name)
    truth = ref.linear(x, weight, fmt, bias, dtype=torch.float64)
    # The interpreter cuts where a GPU rounds.
    most = 6e-3 if launch.interpreted() else 4e-3
    assert relative_error(run(x, stack, bias, plan).cpu(), truth) < most


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
        y = run(x, stack, None, FewPlan(64, 2)).flatten().cpu().float()
        for plan in (OneRowPlan(64, 2, 1), ManyPlan(8, 8, 2, 2)):
            assert torch.equal(y, run(x, stack, None, plan).flatten().cpu().float())
        if name == "int4":
            expected = codes.float() - 8
        else:
            kind = torch.int8 if name == "int8" else torch.float8_e4m3fn
            expected = codes.view(kind).float()
        assert torch.equal(y, expected), name


@pytest.mark.parametrize("plan", [OneRowPlan(16, 4, 2), OneRowPlan(32, 2, 1, 1)])
def test_one_row_of_bytes_in_groups_of_32(plan: OneRowPlan, run: Any) -> None:
    """A format that has no name of its own; the last step has less than all its chunks."""
    fmt = Integer("int8 in groups of 32", 8, 32)
    weight = fmt.quantize(torch.randn(72, 704) / 704**0.5 * torch.rand(72, 704))
    x, bias = torch.randn(1, 704).bfloat16(), torch.randn(72)
    truth = ref.linear(x, weight, fmt, bias, dtype=torch.float64)
    y = run(x, pack_for_gpu(fmt, [weight]), bias, plan).cpu()
    assert relative_error(y, truth) < (6e-3 if launch.interpreted() else 4e-3)


@pytest.mark.parametrize("name", ["int8", "int4", "q4_k", "q6_k"])
@pytest.mark.parametrize("size", [2.0**-40, 2.0**50])
def test_one_row_of_any_size(size: float, name: str, run: Any) -> None:
    """Codes are multiplied as subnormal numbers; what is no number stays none."""
    weight, stack = made(name, 16, 768)
    x = (torch.randn(1, 768) * size).bfloat16()
    truth = ref.linear(x, weight, get_format(name), None, dtype=torch.float64)
    y = run(x, stack, None, OneRowPlan(16, 4, 1)).cpu()
    assert relative_error(y.double() / size, truth / size) < 6e-3
    x[0, 100] = float("inf")
    assert not run(x, stack, None, OneRowPlan(16, 4, 1)).isfinite().any()


@pytest.mark.parametrize("name", ["q4_k", "q6_k"])
def test_one_row_of_k_quants_takes_two_warps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pykernels.gpu.linear.arch", lambda device: (9, 0))
    _, stack = made(name, 16, 768)
    with pytest.raises(PykernelsError, match="two warps or more"):
        linear(torch.zeros(1, 768).bfloat16(), stack, plan=OneRowPlan(16, 1))


@pytest.mark.parametrize("N", [512, 7168, 18432])
@pytest.mark.parametrize("M", [9, 17, 64, 100, 300, 3000])
def test_no_part_of_many_rows_is_empty(M: int, N: int) -> None:
    for steps in (1, 9, 56, 112):
        for kind in ("int4", "int8"):
            plan = many_plan(kind, M, N, steps, 132)
            share = -(-steps // plan.split_k)
            assert -(-steps // share) == plan.split_k
            shared = plan.stages * plan.cols * 128 + plan.word_stages * plan.warps * 1024
            assert shared <= (113 if plan.warps == 4 else 226) * 1024


def test_narrow_matrices_take_more_warps_or_parts() -> None:
    for kind, group in (("int4", 128), ("int4", 32), ("int8", 7168), ("fp8", 128)):
        for M in (1, 16):
            narrow, wide = (few_plan(kind, group, M, N, 132) for N in (7168, 18432))
            assert (narrow.warps, wide.warps) == (8, 4)
        for K in (7168, 18432):
            wide = one_row_plan(kind, group, 18432, K, 132)
            assert wide.programs * wide.warps in (3 * 4 * 132, 3 * 8 * 132, 16 * 132)
    for kind in ("q4_k", "q6_k"):
        assert one_row_plan(kind, 0, 18432, 7168, 132) == OneRowPlan(16, 4, 2, 3 * 132)
        assert one_row_plan(kind, 0, 18432, 7424, 132).registers == 168
    assert many_plan("int8", 64, 7168, 56, 132).split_k == 4
    assert many_plan("int8", 3000, 18432, 56, 132).warps == 8


def test_one_row_of_narrow_matrices() -> None:
    """(rows, of them used, warps, steps ahead) by N: fewer blocks of 32 rows than processors, or as
    many."""

    def found(kind: str, group: int, K: int) -> list[tuple[int, int, int, int]]:
        plans = [one_row_plan(kind, group, N, K, 132) for N in (1536, 4096, 7168, 12671)]
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
        less, enough = (one_row_plan(kind, 128, N, 7168, 132) for N in (first - 1, first))
        assert (less.rows, less.warps) == (16, 8)
        assert (enough.rows, enough.warps) == (32 if kind == "int4" else 16, warps)


def test_blocks_of_one_row_fill_their_places() -> None:
    """Two programs of 8 warps a processor, or four of 4: none has many blocks more than others."""
    for kind, room in (("int4", 2 * 132), ("fp8", 4 * 132)):
        for N in range(32 * 132, 96 * 132, 37):
            plan = one_row_plan(kind, 128, N, 7168, 132)
            whole = -(-N // plan.rows)
            rounds = -(-whole // room)
            if plan.used:
                blocks = -(-N // plan.used)
                assert 3 * plan.rows <= 4 * plan.used <= 4 * plan.rows
                assert 0.9 * rounds * room < blocks <= rounds * room
            else:  # filled places would hold too few rows
                assert 4 * -(-N // (rounds * room)) < 3 * plan.rows
    used = [one_row_plan("int4", 128, N, 7168, 132).used for N in (5120, 6336, 7168, 8192, 8448)]
    assert used == [0, 24, 28, 32, 32]


def test_steps_are_shared_evenly_where_shares_are_long() -> None:
    def programs(kind: str, M: int, N: int, steps: int) -> float:
        """A processor."""
        return many_plan(kind, M, N, steps, 132).programs / 132

    rows = (16, 32, 64, 128, 256, 512)
    assert [programs("q4_k", M, 18432, 56) for M in rows] == [4, 3, 3, 2, 2, 2]
    assert [programs("int8", M, 7168, 144) for M in rows] == [4, 3, 3, 2, 0, 0]
    assert not any(programs("int8", M, 7168, 56) for M in rows)
    assert [programs("int4", 64, N, 56) for N in (18432, 7168, 4096, 1024)] == [4, 4, 3, 0]
    assert [programs("int8", M, 131072, 56) for M in (64, 256, 4096)] == [0, 0, 0]  # many rounds
    halves = [("int8", 4096, 56), ("int8", 7168, 56), ("int4", 7168, 56), ("q4_k", 7168, 144)]
    assert [many_plan(k, 256, N, steps, 132).split_k for k, N, steps in halves] == [2, 1, 2, 2]


def test_which_kernel_takes_which_rows() -> None:
    def found(kind: str, M: int, N: int, capability: tuple[int, int], many: bool = True) -> str:
        return kernel_of(kind, M, N, 7168, 132, capability, many)

    assert found("int8", 1, 7168, (9, 0)) == "gemv"
    assert found("int8", 1, 18432, (9, 0)) == found("fp8", 1, 7168, (8, 0)) == "one"
    assert found("q4_k", 1, 18432, (8, 0)) == "one" and found("q4_k", 2, 18432, (8, 0)) == "few_k"
    assert found("int8", 2, 7168, (9, 0)) == "few"
    assert kernel_of("int4", 1, 7168, 65536, 132, (9, 0), True) == "few"  # too long for one_row
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
    assert isinstance(choose_plan(stack, 1, device), GemmPlan)
    for plan in (OneRowPlan(16, 4), FewPlan(16, 4), ManyPlan(16)):
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
            y = linear(y, stack, plan=FewPlan(32, 4) if i % 3 else None)
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
    plan = many_plan("int8", rows, 18432, 56, 132)
    assert plan.programs
    fmt = get_format(name)
    for M in (rows - 3, 514):
        x = torch.randn(M, 1024).bfloat16()
        truth = ref.linear(x, weight, fmt, None)
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


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("int4-g128", OneRowPlan(16, 4)),
        ("int4-g128", OneRowPlan(16, 4, 4, 132, 160)),
        ("int4", OneRowPlan(16, 4, 3, 132, 168)),
        ("int8-channel", OneRowPlan(16, 4)),
        ("int8-channel", OneRowPlan(16, 16, 3, 132, 128)),
    ],
)
def test_weights_may_be_written_by_the_kernel_in_front(name: str, plan: OneRowPlan) -> None:
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


def _meta_call(
    name: str, M: int, N: int, activations: str = "bf16", K: int = 7168
) -> tuple[str, object]:
    stack = empty_for_gpu(get_format(name), 1, N, K, torch.device("meta"))
    x = torch.empty(M, K, dtype=torch.bfloat16, device="meta")
    bias = torch.empty(N, device="meta") if activations == "fp8" else None
    return f"{name} {M} {N}x{K}", lambda: linear(x, stack, bias, activations=activations)


COMPILES = [
    _meta_call("int4-g128", 1, 18432),
    _meta_call("int4-g128", 1, 7168),
    _meta_call("int4", 1, 7168),
    _meta_call("int4", 1, 18432),
    _meta_call("q4_k", 1, 7168),
    _meta_call("q6_k", 1, 7168),
    _meta_call("q6_k", 1, 18432),
    _meta_call("q4_k", 1, 2048),
    *(_meta_call(name, 1, 7168, K=11008) for name in ("q4_k", "q6_k", "int4")),  # no whole steps
    *(_meta_call(name, 1, 18432, K=7424) for name in ("q4_k", "q6_k")),
    _meta_call("q4_k", 4, 18432),
    _meta_call("q6_k", 2, 7168),
    _meta_call("int4-g128", 2, 18432),
    _meta_call("int8-channel", 8, 7168),
    _meta_call("fp8", 1, 7168),
    _meta_call("q4_k", 1, 18432),
    _meta_call("q4_k", 8, 7168),
    _meta_call("q6_k", 8, 7168),
    _meta_call("int8-channel", 1, 18432),
    _meta_call("int4-g128", 32, 7168),
    _meta_call("int4-g128", 64, 7168),
    _meta_call("int4-g128", 128, 18432),
    _meta_call("q4_k", 16, 18432),
    _meta_call("q6_k", 32, 18432),
    _meta_call("int4", 64, 18432),
    _meta_call("int4", 128, 18432),
    _meta_call("q6_k", 256, 18432),
    _meta_call("fp8", 2048, 7168),
    _meta_call("fp8", 32, 18432),
    _meta_call("fp8", 64, 18432),
    _meta_call("fp8", 64, 4096),
    _meta_call("fp8", 128, 18432),
    _meta_call("fp8", 256, 18432),
    _meta_call("int8-channel", 128, 18432),
    _meta_call("int4-g128", 2048, 18432),
    _meta_call("int4-g128", 2048, 7168),
    _meta_call("int8-channel", 2048, 7168),
    _meta_call("fp8", 128, 2048, activations="fp8"),
    _meta_call("fp8", 2048, 18432, activations="fp8"),
]
