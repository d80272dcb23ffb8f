"""Constraints: what an output may be, beside others and through preemption."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from pykernels.errors import PykernelsError
from runtime.engine import Engine, SamplingParams
from runtime.engine.requests.request import Event

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


def test_an_output_goes_on_behind_what_another_engine_drew() -> None:
    given = params(2, 20, constraint=Steps(7), min_tokens=3)
    (whole,) = Engine(FakeRunner(), threaded=False).generate([[3, 4]], [given])
    for count in (1, 2, 19):
        drawn, events = whole.token_ids[:count], list[Event]()
        engine = Engine(FakeRunner(drawn={2: list(drawn)}), threaded=False)
        engine.submit_to(events.append, [3, 4], given, drawn=drawn)
        while engine.step():
            pass
        assert tuple(event[1] for event in events) == whole.token_ids[count:]
    with pytest.raises(PykernelsError, match="cannot go on behind 20 tokens"):
        engine.submit_to(events.append, [3, 4], given, drawn=whole.token_ids)


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
    # Before any work is done.
    for wrong, cause in (({"dead": 0}, "mine: .*no token"), ({"fails": 0}, "mine .*no grammar")):
        with pytest.raises(PykernelsError, match=cause):
            engine.submit([4], params(4, 20, constraint=Steps(7, **wrong)), name="mine")


class Only:
    """These tokens alone may come, by place in the output."""

    def __init__(self, *places: tuple[int, ...]) -> None:
        self.places = places

    def begin(self) -> Only:
        return Only(*self.places)

    def allowed(self, mask: np.ndarray) -> None:
        for token in self.places[0]:
            mask[token // 32] |= np.int32(1 << token % 32)

    def accept(self, token: int) -> None:
        self.places = self.places[1:]


BANNED, ENDS = {"logit_bias": {5: -math.inf}}, {"stop_token_ids": [6], "min_tokens": 2}


@pytest.mark.parametrize(
    ("allowed", "how", "cause"),
    [
        ((5,), BANNED, "logit_bias excludes: 5"),
        ((6,), ENDS, "min_tokens=2 excludes: 6"),
        ((5, 6), BANNED | ENDS, "logit_bias or min_tokens=2 excludes: 5, 6"),
    ],
)
def test_where_nothing_is_left_of_what_a_constraint_allows(
    allowed: tuple[int, ...], how: dict[str, Any], cause: str
) -> None:
    engine = Engine(FakeRunner(), threaded=False)
    with pytest.raises(PykernelsError, match=f"mine: .*{cause}"):
        engine.submit([1], params(1, 9, constraint=Only(allowed), **how), name="mine")
    later = engine.submit([2], params(2, 9, constraint=Only((7,), allowed), **how), name="later")
    good = engine.submit([3], params(3, 20))
    with pytest.raises(PykernelsError, match=f"later: .*{cause}"):
        later.result()
    assert good.result().token_ids == expected([3], 3, 20)


def test_a_finite_bias_excludes_nothing() -> None:
    """Nor do the first ``min_tokens`` exclude an end token behind them."""
    engine = Engine(FakeRunner(), threaded=False)
    only = Only((5,), (7,), (6,))
    how = params(1, 9, constraint=only, **ENDS, logit_bias={5: -100})
    [result] = engine.generate([[1]], how)
    assert result.token_ids == (5, 7, 6)


def test_biases_that_leave_no_token_are_refused() -> None:
    engine = Engine(FakeRunner(vocab_size=8), threaded=False)
    most = dict.fromkeys(range(7), -math.inf)
    for how in ({"logit_bias": most | {7: -math.inf}}, {"logit_bias": most, **ENDS}):
        how = {**how, "stop_token_ids": [7]}
        with pytest.raises(PykernelsError, match="exclude all 8 tokens"):
            engine.submit([1], params(1, 9, **how))
