"""Constraints: what an output may be, beside others and through preemption."""

from __future__ import annotations

import numpy as np
import pytest

from pykernels.errors import PykernelsError
from runtime.engine import Engine, SamplingParams

from .fake_runner import FakeRunner, expected


class Steps:
    """Token i of the output is i modulo ``period``; ``fails`` at that token."""

    def __init__(self, period: int, fails: int = -1, dead: int = -1) -> None:
        self.period, self.fails, self.dead = period, fails, dead
        self.begun = 0

    def begin(self) -> Steps.Filter:
        self.begun += 1
        return Steps.Filter(self)

    class Filter:
        def __init__(self, steps: Steps) -> None:
            self.steps, self.count = steps, 0

        def allowed(self, mask: np.ndarray) -> None:
            assert mask.shape == (32,) and not mask.any()
            if self.count == self.steps.fails:
                raise ValueError("no grammar")
            if self.count != self.steps.dead:
                bits = np.arange(1024) % self.steps.period == self.count % self.steps.period
                mask[:] = np.packbits(bits, bitorder="little").view(np.int32)

        def accept(self, token: int) -> None:
            assert token % self.steps.period == self.count % self.steps.period
            self.count += 1


def params(seed: int, count: int, **more: object) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=count, **more)  # type: ignore[arg-type]


def test_each_output_keeps_to_its_own_constraint_beside_others() -> None:
    runner = FakeRunner(num_pages=12, max_num_seqs=4)  # too few pages: some are preempted
    engine = Engine(runner, threaded=False)
    seven, five = Steps(7), Steps(5)

    free, *masked = engine.generate(
        [[1, 2], [3, 4], [5, 6]],
        [
            params(1, 20),
            params(2, 20, constraint=seven, n=2, min_tokens=3),
            params(3, 20, constraint=five),
        ],
    )

    assert engine.stats.preemptions
    assert free.token_ids == expected([1, 2], 1, 20)
    for result, steps in zip(masked, (seven, five), strict=True):
        for output in result.completions:
            assert [t % steps.period for t in output.token_ids] == [
                i % steps.period for i in range(20)
            ]
    assert (seven.begun, five.begun) == (2, 1)


def test_a_constraint_that_fails_ends_its_request_alone() -> None:
    engine = Engine(FakeRunner(), threaded=False)
    bad = engine.submit([1], params(1, 20, constraint=Steps(7, fails=3)))
    dead = engine.submit([2], params(2, 20, constraint=Steps(7, dead=3)))
    good = engine.submit([3], params(3, 20))

    assert good.result().token_ids == expected([3], 3, 20)
    with pytest.raises(Exception, match="no grammar"):
        bad.result()
    with pytest.raises(PykernelsError, match="no token"):
        dead.result()
    with pytest.raises(PykernelsError, match="no token"):  # before any work is done
        engine.submit([4], params(4, 20, constraint=Steps(7, dead=0)))
