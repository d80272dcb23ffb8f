"""Short prompts behind a long one, whose steps are parked for them: by a clock of its own."""

from __future__ import annotations

import pytest

from runtime.engine import Engine, EngineConfig, RequestHandle, SamplingParams, StepBatch
from runtime.engine.scheduling.streamed_times import StreamedTimes
from runtime.engine.scheduling.yields import Yields
from runtime.runner.batch import StepResult

from .fake_runner import FakeRunner, expected
from .test_prefill_stream import FakePrefill, TwoStreams

VOCABULARY = 997
CROSSING, TOKEN = 0.3, 0.01
"""Seconds of a streamed step: in which experts cross, and of each token."""
BESIDE = 0.3 / 20
"""Seconds of a prompt's token on the other runner, which is as fast as a crossing at 20 tokens."""
DECODE = 0.02
CONTENTION = 3
"""A step takes so many times as long while a streamed one runs and is not parked."""


class TimedPrefill(FakePrefill):
    """Its steps end by the clock, which stands still for them while they are parked."""

    min_tokens = min_alone = 20
    max_others = 27
    least_seconds = CROSSING

    def launch(self, batch: StepBatch) -> None:
        super().launch(batch)
        self.left_s = max(CROSSING, TOKEN * batch.T)
        self.until = float("inf")

    def park(self, seconds: float) -> None:
        super().park(seconds)
        self.until = self.owner.now + seconds  # type: ignore[attr-defined]

    def passes(self, seconds: float) -> None:
        """So much time, in which a step that is not parked goes on."""
        self.owner.now += seconds  # type: ignore[attr-defined]
        if self.own is not None and not self.works:
            return
        self.left_s = getattr(self, "left_s", 0.0) - seconds

    @property
    def works(self) -> bool:
        return not self.parked or self.owner.now >= self.until  # type: ignore[attr-defined]

    def ready(self) -> bool:
        if self.left_s > 0 and not self.owner.running:
            self.passes(0.01)
        return self.left_s <= 0


class Timed(TwoStreams):
    def __post_init__(self) -> None:
        super().__post_init__()
        self.now, self.beside = 0.0, BESIDE
        self.prefill_runner = TimedPrefill(self)

    def result(self) -> StepResult:
        batch, prefill = self.own, self.prefill_runner
        assert isinstance(prefill, TimedPrefill)
        seconds = DECODE + self.beside * (batch.T - batch.D)
        contended = prefill.own is not None and prefill.works
        prefill.passes(seconds * (CONTENTION if contended else 1))
        return FakeRunner.result(self)


class OneStream(FakeRunner):
    """Streams in its own steps, as where layers keep states."""

    prefill_runner = None
    streams_from, least_seconds = 20, CROSSING

    def __post_init__(self) -> None:
        super().__post_init__()
        self.now = 0.0

    def result(self) -> StepResult:
        prompt = self.own.T - self.own.D
        streamed = self.own.T >= self.streams_from
        self.now += max(CROSSING, TOKEN * prompt) if streamed else DECODE + BESIDE * prompt
        return super().result()


class Served:
    """An engine that reads a prompt of 850 tokens, of which a step has 320 at most."""

    def __init__(self, share: float, kind: type[Timed | OneStream] = Timed) -> None:
        self.runner = kind(
            num_pages=600, vocab_size=VOCABULARY, max_num_batched_tokens=320, max_model_len=900
        )
        config = EngineConfig(prefill_yield=share)
        clock = lambda: self.runner.now  # noqa: E731
        self.engine = Engine(self.runner, threaded=False, config=config, clock=clock)
        self.asked: list[tuple[RequestHandle, list[int], int, int]] = []
        self.long = self.ask(850)

    def ask(self, size: int, count: int = 1) -> RequestHandle:
        seed = len(self.asked)
        prompt = [seed % VOCABULARY, seed // VOCABULARY, *(n % VOCABULARY for n in range(2, size))]
        params = SamplingParams(seed=seed, max_tokens=count, ignore_eos=True)
        handle = self.engine.submit(prompt, params)
        self.asked.append((handle, prompt, seed, count))
        return handle

    def run(self, until: float = float("inf")) -> None:
        while self.runner.now < until and self.engine.step():
            pass

    def first(self, handle: RequestHandle) -> float:
        """Seconds to the first token."""
        seconds = handle.result().completions[0].stats.time_to_first_token
        assert seconds is not None
        return seconds

    def check(self) -> None:
        """All have drawn what they would alone."""
        self.run()
        for handle, prompt, seed, count in self.asked:
            assert handle.result().token_ids == expected(prompt, seed, count, VOCABULARY)


@pytest.mark.parametrize("size", [5, 19, 60], ids=["few", "chunked", "streamed-if-alone"])
def test_a_short_prompt_does_not_wait_for_a_long_one(size: int) -> None:
    seconds = []
    for share in (0.5, 0.0):
        served = Served(share)
        served.run(0.5)
        seconds.append(served.first(served.ask(size)))
        served.check()
    assert seconds[0] <= min(1.0, 0.6 * seconds[1])


@pytest.mark.parametrize("beside", [BESIDE, 3 * BESIDE], ids=["fast", "slow"])
def test_decodes_are_not_held_up(beside: float) -> None:
    """By a long prompt and short ones, once it is known how long these take."""
    served = Served(0.5)
    served.runner.beside = beside
    served.run(0.1)
    decoding = served.ask(5, 200)
    stalls, last = [], served.runner.now
    for _ in decoding:
        stalls.append(served.runner.now - last)
        last = served.runner.now
        if len(stalls) in (5, 10, 15, 20, 50, 70):
            served.ask(15)
    assert max(stalls[40:]) <= 0.5
    served.check()


def test_steps_that_stream_are_no_longer_than_they_must() -> None:
    """Where no other runner does: the first two are, which begin before it is known how long they
    take."""
    stalls = dict[float, list[float]]()
    for share in (0.5, 0.0):
        served = Served(share, OneStream)
        decoding, last = served.ask(5, 40), 0.0
        stalls[share] = []
        for _ in decoding:
            stalls[share].append(served.runner.now - last)
            last = served.runner.now
        served.check()
    assert max(stalls[0.0]) >= 3.2
    assert sorted(stalls[0.5])[-3] <= 1.0 + DECODE


def test_a_long_prompt_is_read_however_many_short_ones_come() -> None:
    alone = Served(0.5)
    alone.check()
    served = Served(0.5)
    while served.long.requests[0].reason is None:
        served.ask(15)
        served.run(served.runner.now + 0.1)
    # As much again for which it is parked, and what a busy machine costs it.
    assert served.first(served.long) <= 3 * served.first(alone.long)
    served.check()


def test_a_step_is_parked_for_its_share_however_long_it_takes() -> None:
    prefill = TimedPrefill(Timed())
    yields = Yields(prefill, 0.5)
    yields.began(0.0)
    for tenth in range(100):
        yields.update(True, tenth / 10)
    assert yields.ended(10.0) == pytest.approx(10 - yields.seconds)
    assert 0.9 * 0.5 * 10 < yields.seconds <= 1 + 0.5 * 10


def test_chunks_are_as_long_as_others_can_wait() -> None:
    times = StreamedTimes(0.3)
    times.record(20, 0.3)  # bound by the crossing: it says nothing
    assert times.most_tokens() > 1 << 60
    times.record(320, 3.2)
    assert times.most_tokens() == 100
    assert times.may_split(60) and not times.may_split(50)
    times.record(320, 320.0)  # a step that was held up by something else
    assert times.most_tokens() == 1
    for _ in range(10):
        times.record(times.most_tokens(), 0.3)
    assert times.most_tokens() > 1000
    slow = StreamedTimes(12.0)
    slow.record(32000, 32.0)
    assert slow.most_tokens() == 24000  # fewer would cost the long prompt a crossing each
