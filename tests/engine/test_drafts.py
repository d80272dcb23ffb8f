"""Drafts of a sequence's next tokens: whatever they are, the text is the same."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pykernels.errors import PykernelsError
from runtime.engine import Engine, EngineConfig, EngineStats, Result, SamplingParams
from runtime.runner.constraint import Mask

from .fake_runner import FakeRunner, Words, check_pages, expected
from .test_ahead import WORDS, random_params

VOCAB = 97


class Known:
    """Drafts from what a run without them has drawn.

    Args:
        change: makes other drafts of the right ones.
    """

    def __init__(self, change: Callable[[list[int]], list[int]] = list) -> None:
        self._rest: dict[tuple[int, ...], list[int]] = {}
        self._change = change

    def add(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        for size in range(len(output)):
            self._rest[(*prompt, *output[:size])] = list(output[size:])

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        right = self._rest.get(tuple(tokens))
        return [] if right is None else self._change(right)


def test_right_drafts_save_steps() -> None:
    runner, drafter = FakeRunner(), Known(lambda right: right[:3])
    engine = Engine(runner, threaded=False, drafter=lambda: drafter)
    drafter.add([1, 2, 3], expected([1, 2, 3], 5, 21))
    [result] = engine.generate([[1, 2, 3]], SamplingParams(seed=5, max_tokens=21))
    assert result.token_ids == expected([1, 2, 3], 5, 21)
    assert runner.sizes == [3, *[4] * 5], "each step brings what it has checked, and one more"
    check_pages(engine._core.scheduler.manager, [])


def test_a_step_with_drafts_has_no_more_tokens_than_it_may() -> None:
    """Of two sequences: those without drafts, and a prompt's, count."""
    runner, drafter = FakeRunner(), Known()
    config = EngineConfig(draft_tokens=8, draft_step_tokens=6)
    engine = Engine(runner, threaded=False, drafter=lambda: drafter, config=config)
    prompts = [[1, 2, 3], [4, 5, 6]]
    for seed, prompt in enumerate(prompts):
        drafter.add(prompt, expected(prompt, seed, 30))
    params = [SamplingParams(seed=seed, max_tokens=30) for seed in range(2)]
    for seed, result in enumerate(engine.generate(prompts, params)):
        assert result.token_ids == expected(prompts[seed], seed, 30)
    assert max(runner.sizes[1:]) == 6


class Odd:
    """A constraint: tokens of one parity, then of the other."""

    def begin(self) -> Odd:
        self._parity = 0
        return self

    def allowed(self, mask: Mask) -> None:
        mask[:] = 0x55555555 if self._parity else -0x55555556
        mask[-1] &= (1 << VOCAB % 32) - 1

    def accept(self, token: int) -> None:
        self._parity = token % 2


def serve(requests: int, drafter: Known | None) -> tuple[list[Result], EngineStats]:
    """Requests that come while others run, with too few pages for all."""
    rng = random.Random(5)
    runner = FakeRunner(num_pages=24, vocab_size=VOCAB, max_num_batched_tokens=32)
    runner.max_num_logits = 32
    engine = Engine(
        runner,
        threaded=False,
        eos_token_ids=[5],
        detokenizer=lambda: Words(WORDS),
        drafter=None if drafter is None else lambda: drafter,
        config=EngineConfig(draft_tokens=30),
    )
    trunk = [rng.randrange(VOCAB) for _ in range(30)]
    handles = []
    for seed in range(requests):
        own = [rng.randrange(VOCAB) for _ in range(1 + seed % 9)]
        params = random_params(rng, 1000 * seed)
        if rng.random() < 0.1:
            params = SamplingParams(seed=1000 * seed, max_tokens=9, constraint=Odd())
        handles.append(engine.submit(trunk[: rng.choice((0, 9, 25))] + own, params))
        for _ in range(rng.randrange(8)):
            engine.step()
    while engine.step():
        pass
    check_pages(engine._core.scheduler.manager, [])
    return [handle.result() for handle in handles], engine.stats


def told(result: Result) -> list[tuple[object, ...]]:
    """All that a consumer sees, besides times."""
    return [
        (o.token_ids, o.text, o.finish_reason, o.logprobs, o.prompt_logprobs)
        for o in result.completions
    ]


def test_two_thousand_requests_draw_the_same_with_any_drafts() -> None:
    """Right and wrong ones, too many, and ids that no token has; beside prompts, penalties and
    constraints, over ends, shared pages and preemptions."""
    rng = random.Random(1)

    def change(right: list[int]) -> list[int]:
        cut = rng.randrange(len(right) + 1)
        wrong = [rng.randrange(-1, VOCAB + 1) for _ in range(rng.randrange(4))]
        return rng.choice((right, right[:cut], right[:cut] + wrong + right[cut:], wrong, []))

    plain, before = serve(2000, None)
    drafter = Known(change)
    for result in plain:
        for output in result.completions:
            drafter.add(result.prompt_ids, output.token_ids)
    drafted, stats = serve(2000, drafter)
    for one, other in zip(plain, drafted, strict=True):
        assert told(one) == told(other)
    assert stats.preemptions > 20 and stats.cached_tokens > 1000
    assert stats.failed_steps == 0 and stats.steps < before.steps
    assert 0.3 < stats.accepted_tokens / stats.draft_tokens < 0.9
    assert stats.accepted_tokens > stats.new_tokens / 4


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"max_num_logits": 16, "draft_tokens": 16}, "draft_tokens=16: .* max_num_logits is 16"),
        ({"max_num_batched_tokens": 4}, "draft_tokens=4: .* max_num_batched_tokens is 4"),
    ],
)
def test_drafts_for_which_a_step_has_no_room(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(PykernelsError, match=line):
        EngineConfig(draft="ngram", **settings)


def test_a_runner_with_too_few_rows_is_refused() -> None:
    with pytest.raises(PykernelsError, match="draft_tokens=10: .* max_num_logits is 10"):
        Engine(FakeRunner(), config=EngineConfig(draft="ngram", draft_tokens=10))
    with pytest.raises(PykernelsError, match="a state"):
        runner = FakeRunner()
        runner.why_no_drafts = "its layers keep a state"
        Engine(runner, config=EngineConfig(draft="ngram"))


def test_a_drafter_that_fails_ends_its_request_alone() -> None:
    class Broken:
        def propose(self, tokens: Sequence[int], most: int) -> list[int]:
            if tokens[0] == 7 and len(tokens) > 3:
                raise ValueError("no such page")
            return []

    engine = Engine(FakeRunner(), threaded=False, drafter=Broken)
    broken, other = (engine.submit([t], SamplingParams(seed=t, max_tokens=9)) for t in (7, 8))
    with pytest.raises(PykernelsError, match="no such page"):
        broken.result()
    assert other.result().token_ids == expected([8], 8, 9)
