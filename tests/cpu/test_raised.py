"""What a kernel raises, wherever it runs, fails its call with that; the next call goes on."""

from __future__ import annotations

import pytest
import torch

from pykernels.cpu import run_serially
from pykernels.cpu.jit import routine
from pykernels.cpu.raised import RAISED
from runtime.workers.pool import TaskError, WorkerPool

from .routed import inputs, load


@routine(10, "raising-tiles")
def raising_tiles(M, w, then, scale, first, last, K, rows, tables, out):
    if M > 0:
        raise ValueError("a tile", 7)
    return 0


@routine(4, "raising-quantize-row")
def raising_quantize_row(row, K, start, stop):
    if K > 0:
        raise KeyError
    return 0


@pytest.mark.parametrize(
    ("T", "field", "told"),
    [
        (9, "tiles", r"gate-up task \d of expert \d raised ValueError\('a tile', 7\)"),
        (1, "quantize_row", r"rows task 0 raised KeyError"),  # by the driver, as the call begins
        (80, "quantize_row", r"rows task \d+ raised KeyError"),
    ],
)
def test_an_exception_below_a_task_fails_the_call(T: int, field: str, told: str) -> None:
    given = inputs(T)
    with WorkerPool(2) as pool:
        routed = load(pool)
        wanted = routed(*given).clone()
        call = routed._bind()[0]._moe
        good = int(call.job[field][0])
        call.job[field] = {"tiles": raising_tiles, "quantize_row": raising_quantize_row}[
            field
        ].address
        for _ in range(2):
            with pytest.raises(TaskError, match=f"^{told}") as caught:
                routed(*given)
            assert type(caught.value.__cause__) in (ValueError, KeyError)
        if field == "tiles":
            with pytest.raises(ValueError, match="a tile"):
                run_serially(call, *given, torch.empty_like(given[0]))
        call.job[field] = good
        assert torch.equal(routed(*given), wanted)


def test_a_routine_may_do_nothing_but_raise():
    @routine(1, "raising-only")
    def unwritten(at):
        raise NotImplementedError

    assert unwritten.ctypes(0) == RAISED
