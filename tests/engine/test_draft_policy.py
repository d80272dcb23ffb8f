"""Which drafts are worth checking: the best ones of all, and none where they were wrong of late."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from runtime.engine import Engine, EngineConfig, SamplingParams
from runtime.engine.requests.acceptance import Acceptance
from runtime.engine.requests.drafters import MakeDrafter
from runtime.engine.scheduling.draft_policy import DraftPolicy
from runtime.planning.drafts import LEAST, best_number, break_even, expected_tokens

from .fake_runner import FakeRunner, expected
from .test_drafts import Known


def test_a_step_yields_tokens_until_a_draft_is_wrong() -> None:
    """As counted in steps whose drafts are right at random."""
    right = np.random.default_rng(2).random((200_000, 4)) < 0.7
    counted = 1 + np.cumprod(right, axis=1).sum(axis=1).mean()
    assert expected_tokens(4, 0.7) == pytest.approx(counted, rel=0.01)
    times = (1.4, 2.0, 9.0, counted / 1.5)
    assert best_number(times, 0.7) == (4, pytest.approx(1.5, rel=0.01))
    assert best_number((2.1, 3.2), 0.9) == (0, 1.0)


def test_break_even_is_where_tokens_pay_for_their_time() -> None:
    """Of two drafts the root of 1 + a + a ** 2 = times."""
    assert break_even(2, 1.75) == pytest.approx(0.5)
    assert break_even(1, 1.9) == pytest.approx(0.9)
    assert break_even(3, 4.01) is None


@pytest.mark.parametrize("sequences", [1, 3])
def test_no_other_choice_of_drafts_is_better(sequences: int) -> None:
    policy, rng = DraftPolicy((1.3, 1.5, 1.8, 2.4, 3.2)), random.Random(sequences)
    for _ in range(40):
        offered = [(rng.random(), rng.randrange(1, 4)) for _ in range(sequences)]

        def speed(counts: tuple[int, ...], offered: list[tuple[float, int]] = offered) -> float:
            pairs = zip(counts, offered, strict=True)
            tokens = sum(expected_tokens(k, rate) for k, (rate, _) in pairs)
            return tokens / policy.times_as_long(sequences, sequences + sum(counts))

        every = itertools.product(*(range(1 + most) for _, most in offered))
        best = max(map(speed, every))
        found = policy.counts(sequences, offered)
        if any(found):
            assert speed(tuple(found)) == pytest.approx(best)
        else:  # what is gained is not worth it
            assert best < speed((0,) * sequences) * (LEAST + 0.1)


def test_drafts_are_known_to_be_right_without_checking() -> None:
    acceptance, text = Acceptance(), [1, 2, 3]
    for token in (4, 5, 6, 7, 8, 9, 10, 11):
        acceptance.watch(text, lambda: [text[-1] + i for i in range(1, 5)])
        text.append(token)
    acceptance.watch(text, list)
    assert 0.7 < acceptance.rate < 0.9, "two drafts of four were right"
    for _ in range(12):
        acceptance.add(0, 4)
    assert acceptance.rate < 0.2
    for _ in range(20):
        acceptance.add(1, 1)
    assert acceptance.rate > 0.8, "one at a time counts as several at once do"


def test_measured_steps_overrule_a_prediction() -> None:
    """Each number of drafts its own: kernels change with the number of tokens."""
    policy, now = DraftPolicy((1.1, 1.2, 1.3, 1.4)), 0.0
    assert policy.counts(1, [(0.8, 4)]) == [4]
    for drafts, best in ((4, [3]), (3, [2]), (2, [1]), (1, [0])):
        for tokens in [1, 1 + drafts] * 20:
            now += 1.0 + 0.9 * (tokens - 1)
            policy.timed(1, tokens, now)
        assert policy.times_as_long(1, 1 + drafts) == pytest.approx(1 + 0.9 * drafts)
        assert policy.counts(1, [(0.8, 4)]) == best


def auto(make: MakeDrafter) -> Engine:
    config = EngineConfig(draft="auto", draft_times=(1.1, 1.2, 1.3, 1.4))
    even = map(float, itertools.count())  # each step takes as long as any other
    clock = even.__next__
    return Engine(FakeRunner(), threaded=False, drafter=make, config=config, clock=clock)


@pytest.mark.parametrize("right_from", [0, 40, 200])
def test_an_output_is_drafted_once_its_drafts_are_right(right_from: int) -> None:
    """Later than at once, since nobody knows before; steps before that check nothing."""
    text = expected([1, 2, 3], 5, 120)
    drafter = Known(lambda right: right if len(right) <= 120 - right_from else [9] * 4)
    drafter.add([1, 2, 3], text)
    with auto(lambda: drafter) as engine:
        [found] = engine.generate([[1, 2, 3]], SamplingParams(seed=5, max_tokens=120))
        stats = engine.stats
    assert found.token_ids == text
    later = max(0, 120 - right_from)
    assert stats.steps < 120 - later * 0.6 + 5
    assert stats.draft_tokens == stats.accepted_tokens
