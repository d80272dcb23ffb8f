"""Prompts whose steps run beside others: everybody draws what they would alone."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from pykernels.errors import PykernelsError
from runtime.engine import (
    Engine,
    EngineConfig,
    RequestHandle,
    SamplingParams,
    StepBatch,
    StepResult,
)
from runtime.kv_cache import BlockManager
from runtime.kv_cache.windows import least_pages
from runtime.runner.route import Route

from .fake_runner import FakeRunner, check_pages, check_windows, expected
from .test_drafts import Known

VOCABULARY = 97


class FakePrefill:
    """Runs prompts over the cache of another runner, which takes some polls.

    What it finds in the cache must be there when it is launched, and the same when it has ended.
    """

    min_tokens, min_alone = 12, 20
    max_others = 19
    least_seconds = 0.0
    routes: Sequence[str] = (Route.STREAMED,)

    def __init__(self, owner: FakeRunner) -> None:
        self.owner, self.left = owner, 0
        self.fail_next: Exception | None = None
        self.own: StepBatch | None = None
        self.sizes: list[int] = []
        self.taken: list[str] = []
        self.parked, self.parks = False, 0

    def __getattr__(self, name: str) -> object:
        return getattr(self.owner, name)

    def take(self, route: str) -> None:
        assert self.own is None and route in self.routes
        self.taken.append(route)

    def launch(self, batch: StepBatch) -> None:
        assert self.own is None
        self.own = batch.like()
        batch.copy_to(self.own)
        self.left = self.owner.rng.randrange(5)  # type: ignore[attr-defined]
        self.found = self._before()

    def park(self, seconds: float) -> None:
        assert not self.parked and seconds > 0
        self.parked = True
        self.parks += 1

    def resume(self) -> None:
        self.parked = False

    def ready(self) -> bool:
        if self.parked:
            return False
        self.left -= 1
        return self.left <= 0

    def result(self) -> StepResult:
        batch, self.own = self.own, None
        assert batch is not None
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        self.own = batch
        for before, now in zip(self.found, self._before(), strict=True):
            assert before.tolist() == now.tolist()
        self.own = None
        self.sizes.append(batch.T)
        self.owner.seen, seen = None, self.owner.seen
        result = self.owner.step(batch)
        self.owner.seen = seen
        return result

    def _before(self) -> list[np.ndarray]:
        """By sequence, what the cache holds of the tokens before this step's."""
        batch, found = self.own, []
        assert batch is not None
        for s in range(batch.S):
            at = np.arange(batch.positions[batch.query_start_loc[s]])
            table = batch.page_tables[batch.page_table_rows[s]]
            size = self.owner.page_size
            found.append(self.owner.cache[table[at // size] * size + at % size])
            if self.owner.window_pages:
                assert batch.window_tables is not None
                at = at[max(0, len(at) - self.owner.window + 1) :]
                table = batch.window_tables[batch.page_table_rows[s]]
                found.append(self.owner.windowed[table[at // size] * size + at % size])
            assert all((each >= 0).all() for each in found)
        return found


class TwoStreams(FakeRunner):
    def __post_init__(self) -> None:
        super().__post_init__()
        self.rng = random.Random(3)
        self.prefill_runner = FakePrefill(self)
        self.own_sizes: list[int] = []

    def launch(self, batch: StepBatch) -> None:
        assert batch.T == batch.S or batch.T <= self.prefill_runner.max_others
        self.own_sizes.append(batch.T)
        super().launch(batch)


def made(
    overlap: bool = True, drafter: Known | None = None, window: int = 0
) -> tuple[Engine, TwoStreams]:
    runner = TwoStreams(num_pages=44, vocab_size=VOCABULARY, max_num_batched_tokens=24)
    if window:
        runner.window, runner.window_pages = window, least_pages(8, window, 4)
        runner.windowed = np.full(4 * runner.window_pages, -1)
    config = EngineConfig(overlap=overlap)
    make = None if drafter is None else lambda: drafter
    return Engine(runner, threaded=False, config=config, drafter=make), runner


def manager_of(engine: Engine) -> BlockManager:
    return engine._core.scheduler.manager


@pytest.mark.parametrize(
    ("overlap", "drafts", "window"),
    [(True, False, 0), (False, False, 0), (True, True, 0), (True, False, 9)],
)
def test_draws_are_those_of_each_request_alone(overlap: bool, drafts: bool, window: int) -> None:
    """300 requests, with too few pages for all; some are cancelled, or their step fails."""
    drafter = Known(lambda right: [*right[: len(right) % 5], 3])
    engine, runner = made(overlap, drafter if drafts else None, window)
    rng = random.Random(5)
    trunk: list[int] = []
    asked: list[tuple[RequestHandle, list[int], int, int]] = []
    for seed in range(300):
        if seed % 5 == 0:
            trunk = [rng.randrange(VOCABULARY) for _ in range(60)]
        prompt = trunk[: rng.choice((0, 9, 25, 50))]
        prompt += [rng.randrange(VOCABULARY) for _ in range(rng.choice((1, 7, 30)))]
        count = rng.randrange(1, 30)
        params = SamplingParams(seed=seed, max_tokens=count, priority=rng.randrange(2))
        drafter.add(prompt, expected(prompt, seed, count, VOCABULARY))
        asked.append((engine.submit(prompt, params), prompt, seed, count))
        for _ in range(rng.randrange(6)):
            engine.step()
        if rng.random() < 0.3:
            asked[-1][0].cancel()
        if seed % 20 == 19:
            runner.prefill_runner.fail_next = ValueError("no")
        if seed % 70 == 69:
            runner.fail_next = ValueError("no")
    while engine.step():
        pass
    reasons = set[str | None]()
    for handle, prompt, seed, count in asked:
        try:
            [completion] = handle.result().completions
        except PykernelsError:
            reasons.add("error")
            continue
        wanted = expected(prompt, seed, count, VOCABULARY)
        assert completion.token_ids == wanted[: len(completion.token_ids)]
        assert completion.finish_reason != "length" or len(completion.token_ids) == count
        reasons.add(completion.finish_reason)
    assert reasons == {"length", "cancelled", "error"}
    assert engine.stats.preemptions and engine.stats.cached_tokens > 100
    assert len(runner.prefill_runner.sizes) > 20
    assert (runner.prefill_runner.parks > 20) == overlap
    assert (engine.stats.accepted_tokens > 100) == drafts
    check_pages(manager_of(engine), [])
    if window:
        check_windows(manager_of(engine), [])


def test_steps_beside_are_as_large_as_their_runner_can() -> None:
    """Prompts that are each too short for the prefill stream, and together longer than any other
    step."""
    engine, runner = made()
    long = engine.submit(list(range(60)), SamplingParams(max_tokens=2))
    engine.step()
    asked = [([n] * 11, n) for n in range(7)]
    handles = [
        engine.submit(prompt, SamplingParams(seed=seed, max_tokens=9)) for prompt, seed in asked
    ]
    while engine.step():
        pass
    for handle, (prompt, seed) in zip(handles, asked, strict=True):
        assert handle.result().token_ids == tuple(expected(prompt, seed, 9, VOCABULARY))
    assert long.result().token_ids
    assert max(runner.own_sizes) == runner.prefill_runner.max_others
