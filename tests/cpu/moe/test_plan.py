"""How calls are cut into tasks."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from pykernels.cpu.backends import amx, avx512
from pykernels.cpu.gemm.common import MAX_BLOCKS
from pykernels.cpu.gemv.common import MAX_TOKENS
from pykernels.cpu.moe.kernel import NEVER
from pykernels.cpu.moe.plan import GEMM_FROM, MoEPlan, gemm_from_here, plan
from pykernels.cpu.weights.layout import INTEGERS
from pykernels.errors import PykernelsError
from pykernels.quant import FORMATS, get_format
from pykernels.shapes import MoEShape
from pykernels.target import ISA_NAMES, detect

SHAPE, FP8 = MoEShape(E=32, H=7168, I=2048, topk=8), get_format("fp8")
EMBEDDED = MoEShape(E=32, H=256, I=128, topk=6)


def _lengths(cuts: list[int]) -> list[int]:
    return [stop - start for start, stop in itertools.pairwise(cuts)]


def test_defaults_of_amx() -> None:
    """A format's own default is a pass of tiles or more."""
    assert amx.gemm_from("fp8", "bf16", detect()) == MAX_TOKENS + 1 > amx.GEMM_FROM == GEMM_FROM
    for fmt in FORMATS.values():
        assert amx.gemm_from(fmt.name, "bf16", detect()) >= amx.GEMM_FROM
        if fmt.int8_kind:
            assert amx.gemm_from(fmt.name, "int8", detect()) > MAX_TOKENS


def test_defaults_of_avx512() -> None:
    """Tiles of int8 slices put the GEMM off, multiply-adds bring it on."""
    newer = replace(detect(), isa=frozenset(ISA_NAMES))
    intel, amd = (replace(newer, vendor=name) for name in ("GenuineIntel", "AuthenticAMD"))
    older = replace(intel, isa=newer.isa - {"avx512vnni"})
    for name in FORMATS:
        slices, alone = (avx512.gemm_from(name, "bf16", cpu) for cpu in (intel, older))
        if name in INTEGERS:
            assert slices > MAX_TOKENS and slices >= alone
            assert avx512.gemm_from(name, "int8", intel) > avx512.GEMM_FROM
        else:
            assert slices == alone
        assert avx512.gemm_from(name, "bf16", amd) == avx512.GEMM_FROM
        assert avx512.gemm_from(name, "int8", older) == avx512.GEMM_FROM
    assert avx512.gemm_from("fp8", "bf16", intel) < avx512.GEMM_FROM
    assert gemm_from_here("generic", "fp8") is None


@pytest.mark.parametrize(
    ("threads", "T", "i_chunk"),
    [
        pytest.param(16, 1, 2, id="8 experts of 64 blocks among 256 tasks"),
        pytest.param(5, 1, 7, id="rounded up: no more tasks than wanted"),
        pytest.param(16, 8, 8, id="no more experts than the layer has"),
        pytest.param(1, 1, 18, id="no more than 8 MiB of gate and up"),
        pytest.param(16, 256, 8, id="GEMM: what it takes at once"),
        pytest.param(96, 256, 4, id="GEMM: 32 experts of 64 blocks among 576 tasks"),
    ],
)
def test_gate_up_tasks_share_the_blocks_of_active_experts(threads, T, i_chunk) -> None:
    assert plan(SHAPE, FP8, threads, T).i_chunk == i_chunk


@pytest.mark.parametrize(
    ("T", "gemm_from", "splits"),
    [
        pytest.param(20, 9, 8, id="five tokens of each expert"),
        pytest.param(19, 9, 1, id="fewer"),
        pytest.param(20, NEVER, 8, id="without a GEMM too"),
        pytest.param(1, 1, 8, id="fewer than the GEMM takes"),
    ],
)
def test_down_tasks_are_split_by_experts(T, gemm_from, splits) -> None:
    """From five tokens an expert, or where experts take the GEMM."""
    assert plan(SHAPE, FP8, 16, T, gemm_from).down_splits == splits
    few = MoEShape(E=3, H=7168, I=2048, topk=3)
    assert plan(few, FP8, 16, 20).down_splits == 3  # no more than experts


@pytest.mark.parametrize(("threads", "T"), [(1, 1), (16, 1), (16, 8), (96, 1)])
def test_down_tasks_grow_shorter_to_the_end(threads: int, T: int) -> None:
    blocks = SHAPE.H // 32
    cuts = plan(SHAPE, FP8, threads, T).down_cuts(blocks)
    lengths = _lengths(cuts)
    assert cuts[0] == 0 and cuts[-1] == blocks
    assert lengths == sorted(lengths, reverse=True) and lengths[-1] == 1
    # What is left when a task begins keeps every other thread busy for as long.
    for at, length in zip(cuts, lengths, strict=False):
        assert length <= max(1, (blocks - at) // threads)


@pytest.mark.parametrize("threads", [1, 16, 96])
def test_down_tasks_of_many_tokens_are_long_in_outputs(threads) -> None:
    cut = plan(SHAPE, FP8, threads, 2048)
    lengths = _lengths(cut.down_cuts(SHAPE.H // 32))
    assert sum(lengths) == SHAPE.H // 32 and max(lengths) <= MAX_BLOCKS
    assert len(set(lengths[:-1])) == 1 and lengths[-1] <= lengths[0]
    # A split waits for the one before it, so more runs than threads; and a call ends with a split.
    assert len(lengths) > threads and len(lengths) * cut.down_splits >= 8 * threads


@pytest.mark.parametrize(
    ("blocks", "chunk", "lengths"), [(5, 2, [2, 2, 1]), (3, 9, [3]), (0, 1, [])]
)
def test_without_a_share_down_tasks_are_equal(blocks, chunk, lengths) -> None:
    assert _lengths(MoEPlan(1, chunk).down_cuts(blocks)) == lengths


@pytest.mark.parametrize(
    ("shape", "T", "threads", "row_chunk"),
    [
        pytest.param(SHAPE, 1, 16, 0, id="decode: the driver"),
        pytest.param(EMBEDDED, 512, 2, 0, id="short rows: the driver"),
        pytest.param(SHAPE, 32, 16, 1, id="as many tasks as keep all threads busy"),
        pytest.param(SHAPE, 8192, 2, 16, id="a long prompt: no longer tasks"),
    ],
)
def test_the_driver_copies_few_inputs(shape, T, threads, row_chunk):
    assert plan(shape, FP8, threads, T).row_chunk == row_chunk


@pytest.mark.parametrize(
    "cut", [(0, 1), (1, -1), (1, 1, -4), (1, 1, 5, -1), (1, 1, 5, 0, -1), (1, 1, 5, 0, 0, 0)]
)
def test_impossible_plans_are_refused(cut) -> None:
    with pytest.raises(PykernelsError, match="cannot be cut by MoEPlan"):
        MoEPlan(*cut)
