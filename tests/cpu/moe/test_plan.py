"""How calls are cut into tasks."""

from __future__ import annotations

import itertools

import pytest

from pykernels.cpu.gemm.common import MAX_BLOCKS
from pykernels.cpu.moe.plan import MoEPlan, plan
from pykernels.errors import PykernelsError
from pykernels.quant import get_format
from pykernels.shapes import MoEShape

SHAPE, FP8 = MoEShape(E=32, H=7168, I=2048, topk=8), get_format("fp8")


def _lengths(cuts: list[int]) -> list[int]:
    return [stop - start for start, stop in itertools.pairwise(cuts)]


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


@pytest.mark.parametrize("cut", [(0, 1), (1, -1), (1, 1, -4), (1, 1, 5, -1), (1, 1, 5, 0, 0)])
def test_impossible_plans_are_refused(cut) -> None:
    with pytest.raises(PykernelsError, match="cannot be cut by MoEPlan"):
        MoEPlan(*cut)
