"""How calls are cut into tasks."""

from __future__ import annotations

import itertools

import pytest

from pykernels.cpu.gemm.common import MAX_BLOCKS
from pykernels.cpu.gemv.avx512 import MAX_TOKENS
from pykernels.cpu.moe.kernel import NEVER
from pykernels.cpu.moe.plan import GEMM_FROM, MoEPlan, default_gemm_from, plan
from pykernels.cpu.weights.layout import INTEGERS
from pykernels.errors import PykernelsError
from pykernels.quant import FORMATS, get_format
from pykernels.shapes import MoEShape

SHAPE, FP8 = MoEShape(E=32, H=7168, I=2048, topk=8), get_format("fp8")


def _lengths(cuts: list[int]) -> list[int]:
    return [stop - start for start, stop in itertools.pairwise(cuts)]


def test_the_plan_carries_the_threshold() -> None:
    assert plan(SHAPE, FP8, 16, 8).gemm_from == GEMM_FROM["amx"]
    assert plan(SHAPE, FP8, 16, 256, NEVER).gemm_from == NEVER


def test_amx_tiles_and_int8_inputs_put_the_gemm_off() -> None:
    """A format's own default is a pass of tiles or more, of a backend that has a GEMM."""
    assert default_gemm_from("amx", "fp8") == MAX_TOKENS + 1 > default_gemm_from("amx", "q4_k")
    for fmt in FORMATS.values():
        exact = default_gemm_from("amx", fmt.name)
        assert exact >= GEMM_FROM["amx"]
        if fmt.int8_kind:
            assert default_gemm_from("amx", fmt.name, "int8") > MAX_TOKENS
    assert default_gemm_from("avx512", "fp8") == GEMM_FROM["avx512"]
    assert default_gemm_from("generic", "fp8") is None


def test_tiles_of_digits_put_the_gemm_off_and_multiply_adds_bring_it_on() -> None:
    """Where an AVX-512 CPU has slow bfloat16 products; AMX does not ask."""
    for name in FORMATS:
        digits = default_gemm_from("avx512", name, digits=True, fma=True)
        alone = default_gemm_from("avx512", name, fma=True)
        if name in INTEGERS:
            assert digits > MAX_TOKENS and digits >= alone
            assert default_gemm_from("avx512", name, "int8", True, True) > GEMM_FROM["avx512"]
        else:
            assert digits == alone
        assert default_gemm_from("avx512", name, "int8", fma=True) == GEMM_FROM["avx512"]
        assert default_gemm_from("amx", name, "bf16", True, True) == default_gemm_from("amx", name)
    assert default_gemm_from("avx512", "fp8", fma=True) < GEMM_FROM["avx512"]


def test_more_threads_have_shorter_tasks() -> None:
    many, few = plan(SHAPE, FP8, 16, 1), plan(SHAPE, FP8, 2, 1)
    assert many.i_chunk < few.i_chunk and many.h_share > few.h_share


def test_a_task_of_the_gemm_is_as_long_as_it_takes_at_once() -> None:
    crowded = plan(SHAPE, FP8, 1, 256)
    assert crowded.h_chunk <= MAX_BLOCKS and crowded.i_chunk <= MAX_BLOCKS // 2
    assert plan(SHAPE, FP8, 1, 1).h_chunk > MAX_BLOCKS


@pytest.mark.parametrize(
    ("threads", "T", "i_chunk"),
    [
        pytest.param(16, 1, 2, id="8 experts of 64 blocks among 256 tasks"),
        pytest.param(5, 1, 7, id="rounded up: no more tasks than were asked for"),
        pytest.param(16, 8, 8, id="no more experts than the layer has"),
        pytest.param(1, 1, 18, id="no more than 8 MiB of gate and up"),
        pytest.param(16, 256, 8, id="crowded: what the GEMM takes at once"),
        pytest.param(96, 256, 4, id="crowded: 32 experts of 64 blocks among 576 tasks"),
    ],
)
def test_gate_up_tasks_share_the_blocks_of_active_experts(threads, T, i_chunk) -> None:
    assert plan(SHAPE, FP8, threads, T).i_chunk == i_chunk


@pytest.mark.parametrize(
    ("T", "gemm_from", "legs"),
    [
        pytest.param(20, 9, 8, id="five tokens of each expert"),
        pytest.param(19, 9, 1, id="fewer"),
        pytest.param(20, NEVER, 8, id="without a GEMM too"),
        pytest.param(1, 1, 8, id="fewer than the GEMM takes"),
    ],
)
def test_experts_are_crowded_from_five_tokens_or_where_they_take_the_gemm(
    T, gemm_from, legs
) -> None:
    assert plan(SHAPE, FP8, 16, T, gemm_from).down_splits == legs
    few = MoEShape(E=3, H=7168, I=2048, topk=3)
    assert plan(few, FP8, 16, 20).down_splits == 3  # no more than experts


@pytest.mark.parametrize(("threads", "T"), [(1, 1), (2, 1), (16, 1), (16, 8), (96, 1)])
def test_down_tasks_grow_shorter_to_the_end(threads: int, T: int) -> None:
    blocks = SHAPE.H // 32
    cuts = plan(SHAPE, FP8, threads, T).down_cuts(blocks)
    lengths = _lengths(cuts)
    assert cuts[0] == 0 and cuts[-1] == blocks
    assert lengths == sorted(lengths, reverse=True) and lengths[-1] == 1
    # What is left when a task begins keeps every other thread busy for as long.
    for at, length in zip(cuts, lengths, strict=False):
        assert length <= max(1, (blocks - at) // threads)


@pytest.mark.parametrize("threads", [1, 2, 16, 96])
def test_down_tasks_of_crowded_experts_are_long_in_outputs_and_short_in_experts(threads) -> None:
    cut = plan(SHAPE, FP8, threads, 2048)
    lengths = _lengths(cut.down_cuts(SHAPE.H // 32))
    assert sum(lengths) == SHAPE.H // 32 and max(lengths) <= MAX_BLOCKS
    assert len(set(lengths[:-1])) == 1 and lengths[-1] <= lengths[0]
    # A leg waits for the one before it, so more runs than threads; and a call ends with a leg.
    assert len(lengths) > threads and len(lengths) * cut.down_splits >= 8 * threads
    assert plan(SHAPE, FP8, threads, 1).down_splits == 1


@pytest.mark.parametrize(
    ("blocks", "chunk", "lengths"), [(5, 2, [2, 2, 1]), (3, 9, [3]), (0, 1, [])]
)
def test_without_a_share_down_tasks_are_alike(blocks, chunk, lengths) -> None:
    assert _lengths(MoEPlan(1, chunk).down_cuts(blocks)) == lengths


@pytest.mark.parametrize(
    "cut", [(0, 1), (1, -1), (1, 1, -4), (1, 1, 5, -1), (1, 1, 5, 0, -1), (1, 1, 5, 0, 0, 0)]
)
def test_a_cut_that_no_call_can_have_is_refused(cut) -> None:
    with pytest.raises(PykernelsError, match="cannot be cut by MoEPlan"):
        MoEPlan(*cut)
