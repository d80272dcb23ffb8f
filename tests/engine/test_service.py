"""An engine as a server needs it: latency beside long prompts, bounds, ageing, drain, failure."""

from __future__ import annotations

import pytest

from pykernels.errors import PykernelsError
from runtime.engine import (
    DeviceLost,
    Engine,
    EngineBusy,
    EngineConfig,
    SamplingParams,
    StepBatch,
    StepResult,
)

from .fake_runner import FakeRunner, expected


class TimedRunner(FakeRunner):
    """Its steps take 20 ms, and 1 ms for each token of a prompt; it has a clock of its own."""

    now = 0.0

    def step(self, batch: StepBatch) -> StepResult:
        self.now += 0.020 + 0.001 * (batch.T - batch.S)
        return super().step(batch)


def params(seed: int, count: int, **more: object) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=count, **more)  # type: ignore[arg-type]


def timed(config: EngineConfig | None = None, **sizes: int) -> tuple[Engine, TimedRunner]:
    runner = TimedRunner(**sizes)
    engine = Engine(runner, threaded=False, config=config, clock=lambda: runner.now)
    return engine, runner


def test_a_long_prompt_keeps_the_inter_token_time_of_decodes() -> None:
    config = EngineConfig(target_itl_ms=100)
    engine, runner = timed(
        config,
        max_num_batched_tokens=512,
        num_pages=400,
        page_size=16,
        max_model_len=6000,
        vocab_size=5000,
    )
    streams = [engine.submit([i], params(i, 400)) for i in range(4)]
    engine.step()
    engine.step()
    prompt = list(range(4000))
    long = engine.submit(prompt, params(9, 1))
    steps = []
    while not long.requests[0].output:
        before = runner.now
        engine.step()
        steps.append(runner.now - before)
    steps.sort()
    assert steps[int(0.99 * len(steps))] <= 0.150, "p99 at most 1.5 times the target"
    assert steps[len(steps) // 2] >= 0.080, "and the target is used"
    assert long.result().token_ids == expected(prompt, 9, 1, vocab=5000)
    for i, stream in enumerate(streams):
        assert stream.result().token_ids == expected([i], i, 400, vocab=5000)


def test_short_prompts_do_not_wait_for_the_end_of_a_long_one() -> None:
    engine, runner = timed(max_num_batched_tokens=16, num_pages=100, max_model_len=300)
    long = engine.submit(list(range(200)), params(0, 1))
    engine.step()
    short = engine.submit([7] * 8, params(1, 1))
    assert short.result().token_ids == expected([7] * 8, 1, 1)
    # The second step ran already when the prompt came.
    assert not long.requests[0].output and runner.sizes == [16] * 3, "half of the budget each"
    assert long.result().token_ids == expected(list(range(200)), 0, 1)


def test_who_has_waited_long_is_served_before_better_priorities() -> None:
    engine, runner = timed(EngineConfig(ageing_seconds=5), max_num_seqs=1)
    busy = engine.submit([1], params(1, 2))
    engine.step()
    old = engine.submit([2], params(2, 1, priority=1))
    runner.now += 5.1
    new = engine.submit([3], params(3, 1, priority=0))
    for handle in (busy, old, new):
        handle.result()
    assert list(runner.drawn) == [1, 2, 3]


def test_more_than_may_wait_are_refused() -> None:
    engine = Engine(FakeRunner(max_num_seqs=1), threaded=False, config=EngineConfig(max_waiting=2))
    handles = [engine.submit([i], params(i, 3)) for i in range(3)]  # one runs, two wait
    with pytest.raises(EngineBusy, match="waiting"):
        engine.submit([9], params(9, 3))
    handles[0].result()
    handles.append(engine.submit([3], params(3, 3)))
    for i, handle in enumerate(handles):
        assert handle.result().token_ids == expected([i], i, 3)


@pytest.mark.parametrize("threaded", [False, True])
def test_drain_finishes_what_runs_and_refuses_what_comes(threaded: bool) -> None:
    engine = Engine(FakeRunner(), threaded=threaded)
    assert engine.healthy
    handles = [engine.submit([i], params(i, 20)) for i in range(12)]
    assert engine.drain(timeout=60) and not engine.healthy
    with pytest.raises(PykernelsError, match="drain"):
        engine.submit([1], params(1, 1))
    for i, handle in enumerate(handles):
        assert handle.result().token_ids == expected([i], i, 20)
    engine.close()


@pytest.mark.parametrize("threaded", [False, True])
def test_a_lost_device_ends_every_request_and_the_engine(threaded: bool) -> None:
    runner = FakeRunner(max_num_seqs=1)
    runner.fail_next = DeviceLost("the GPU fell off the bus", "Load the model again")
    engine = Engine(runner, threaded=threaded)
    handle = engine.submit([1], params(1, 3, n=2))  # one runs, one waits
    with pytest.raises(PykernelsError, match="fell off the bus"):
        handle.result()
    assert not engine.healthy
    with pytest.raises(PykernelsError, match="fell off the bus"):
        engine.submit([1], params(1, 1))
    engine.close()
    assert all(request.reason for request in handle.requests), "nobody waits for ever"


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_seqs": 0},
        {"max_num_batched_tokens": -1},
        {"max_num_batched_tokens": True},
        {"kv_tokens": 1.5},
        {"kv_tokens": 64, "kv_bytes": 1 << 20},
        {"target_itl_ms": 0},
        {"target_itl_ms": float("nan")},
        {"max_waiting": -1},
    ],
)
def test_settings_out_of_range_are_named(settings: dict) -> None:
    with pytest.raises(PykernelsError, match=next(iter(settings))):
        EngineConfig(**settings)


def test_the_pace_is_that_of_decode_steps_alone() -> None:
    """A prompt's step beside them takes longer, and counts neither itself nor to the next one."""
    engine, runner = timed(max_num_batched_tokens=16, num_pages=200)
    first = engine.submit([1, 2, 3], params(1, 150))
    while len(first.requests[0].output) < 60:
        engine.step()
    assert engine.pace is None
    engine.submit(list(range(150)), params(2, 1))
    while engine.step():
        pass
    pace = engine.pace
    assert pace is not None and pace.sequences == 1
    assert pace.seconds == pytest.approx(0.020)
    assert 50 < pace.context < 60  # of the 17th step to the 80th
