"""How requests end: stops, deadlines, cancels, errors; and how consumers hear of it."""

from __future__ import annotations

import asyncio
import math
import signal
import threading
import time

import pytest

from pykernels.errors import PykernelsError
from runtime.engine import AsyncRequestHandle, Engine, SamplingParams, StepBatch, StepResult

from .fake_runner import FakeRunner, Words, expected, text_of

WORDS = ("a", "b", "ab", "c", "ba", "caa", "bb")


def test_stop_strings_never_show_in_any_chunk() -> None:
    """At every split of the text into tokens, and for stops that overlap one another."""
    stops = ("bbc", "caa", "ababab", "cc")
    for seed in range(60):
        engine = Engine(FakeRunner(), threaded=False, detokenizer=lambda: Words(WORDS))
        least = seed % 3
        how = SamplingParams(seed=seed, max_tokens=3 + seed % 17, stop=stops, min_tokens=least)
        handle = engine.submit([seed], how)
        shown = "".join(chunk.text for chunk in handle)
        completion = handle.result().completions[0]
        free = len(text_of(completion.token_ids[:least], WORDS))  # here stops do not count
        raw = text_of(completion.token_ids, WORDS) + Words.REST
        cuts = [at for stop in stops if (at := raw.find(stop, free)) >= 0]
        assert shown == completion.text == raw[: min(cuts, default=len(raw))]
        assert completion.finish_reason == ("stop" if cuts else "length")
        before = text_of(completion.token_ids[:-1], WORDS)[free:]
        assert not any(stop in before for stop in stops), "it ended too late"


def test_end_tokens_end_after_min_tokens() -> None:
    whole = expected([1], 4, 30)
    engine = Engine(
        FakeRunner(),
        threaded=False,
        eos_token_ids=[whole[5]],
        detokenizer=lambda: Words(WORDS),
    )
    how = {"seed": 4, "max_tokens": 20, "temperature": 0.5}

    def run(seed: int, **more: object) -> tuple[tuple[int, ...], str]:
        engine._core.runner.drawn.clear()  # type: ignore[attr-defined]
        [result] = engine.generate([[1]], SamplingParams(**{**how, **more}))  # type: ignore[arg-type]
        reason = result.completions[0].finish_reason
        shown = result.token_ids[: -1 if reason == "stop" else None]
        assert result.text == text_of(shown, WORDS) + Words.REST
        return result.token_ids, reason

    assert run(4) == (whole[:6], "stop")
    assert run(4, ignore_eos=True) == (whole[:20], "length")
    assert run(4, stop_token_ids=[whole[2]]) == (whole[:3], "stop")
    late, _ = run(4, min_tokens=8)
    assert len(late) >= 8 and whole[5] not in late[:8], "not drawn at all, rather than ignored"


def test_cancels_and_deadlines_keep_what_was_drawn() -> None:
    now = [0.0]
    engine = Engine(FakeRunner(max_num_seqs=2), threaded=False, clock=lambda: now[0])
    long, late, queued = (
        engine.submit([i], SamplingParams(seed=i, max_tokens=100, deadline=limit))
        for i, limit in enumerate((None, 30, 0))
    )
    for _ in range(3):
        engine.step()
    assert queued.result().completions[0].finish_reason == "deadline"
    now[0] = 60
    assert late.result().token_ids == expected([1], 1, 3)
    long.cancel()
    long.cancel()
    result = long.result().completions[0]
    assert (result.finish_reason, result.token_ids) == ("cancelled", expected([0], 0, 4))
    assert not engine.step()


def test_an_error_ends_its_step_and_nothing_else() -> None:
    runner = FakeRunner(max_num_seqs=1)
    engine = Engine(runner, threaded=False)
    one, other = (engine.submit([i], SamplingParams(seed=i, max_tokens=9)) for i in range(2))
    engine.step()
    runner.fail_next = ValueError("no such\nluck")
    with pytest.raises(PykernelsError, match="request-1 failed: ValueError: no such luck") as told:
        one.result()
    assert isinstance(told.value.__cause__, ValueError)
    assert other.result().token_ids == expected([1], 1, 9)


def test_logprobs_come_with_their_tokens() -> None:
    engine = Engine(FakeRunner(), threaded=False)
    [result] = engine.generate([[1]], SamplingParams(seed=1, max_tokens=3, logprobs=2))
    output = result.completions[0]
    assert [entry.token for entry in output.logprobs] == list(output.token_ids)
    assert output.logprobs[0].top == ((0, 0.0), (1, -1.0))


class SlowRunner(FakeRunner):
    """Steps only while it may."""

    def step(self, batch: StepBatch) -> StepResult:
        self.may.wait()
        return super().step(batch)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.may = threading.Event()


def test_threads_and_tasks_share_one_engine() -> None:
    with Engine(FakeRunner(), detokenizer=lambda: Words(WORDS)) as engine:
        texts: dict[int, str] = {}

        def stream(seed: int) -> None:
            chunks = list(engine.stream([seed], SamplingParams(seed=seed, max_tokens=30)))
            texts[seed] = "".join(chunk.text for chunk in chunks)

        async def serve() -> list[list[int]]:
            async def one(seed: int) -> list[int]:
                how = SamplingParams(seed=seed, max_tokens=30)
                return [t async for chunk in engine.astream([seed], how) for t in chunk.token_ids]

            return await asyncio.gather(*(one(seed) for seed in range(10, 14)))

        threads = [threading.Thread(target=stream, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        outputs = asyncio.run(serve())
        for thread in threads:
            thread.join()
        assert outputs == [list(expected([s], s, 30)) for s in range(10, 14)]
        for seed in range(4):
            assert texts[seed] == text_of(expected([seed], seed, 30), WORDS) + Words.REST


def test_who_stops_listening_cancels() -> None:
    engine = Engine(FakeRunner(), threaded=False)
    chunks = engine.stream([1], SamplingParams(seed=5))
    assert next(chunks).token_ids == expected([1], 5, 1)
    chunks.close()  # type: ignore[attr-defined]
    assert not engine.step() and engine.stats.finished == 1


def test_requests_of_a_closed_event_loop_end() -> None:
    runner = SlowRunner()

    async def leave(engine: Engine) -> list[AsyncRequestHandle]:
        return [engine.asubmit([seed], SamplingParams(seed=seed)) for seed in range(3)]

    with Engine(runner) as engine:
        handles = asyncio.run(leave(engine))
        runner.may.set()
        while engine.stats.finished < 3:
            time.sleep(0.001)
        assert [handle.requests[0].num_output_tokens for handle in handles] == [1, 1, 1]


def test_close_ends_what_waits_and_what_comes_later() -> None:
    runner = SlowRunner()
    engine = Engine(runner)
    handles = [engine.submit([i], SamplingParams(seed=i, max_tokens=99)) for i in range(20)]
    threading.Timer(0.05, runner.may.set).start()
    engine.close()
    engine.close()
    assert {h.result().completions[0].finish_reason for h in handles} == {"cancelled"}
    with pytest.raises(PykernelsError, match="closed"):
        engine.submit([1])


def test_interrupted_generate_cancels_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = FakeRunner()
    engine = Engine(runner, threaded=False)

    def interrupted(batch: StepBatch) -> StepResult:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([[i] * 10 for i in range(9)], SamplingParams(max_tokens=5))
    assert not engine.step()
    assert engine.stats.finished == 9


def test_ctrl_c_ends_generate_and_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, may = FakeRunner(), threading.Event()
    main, step = threading.main_thread().ident, runner.step
    assert main is not None

    def interrupting(batch: StepBatch) -> StepResult:
        signal.pthread_kill(main, signal.SIGINT)
        may.wait()
        return step(batch)

    monkeypatch.setattr(runner, "step", interrupting)
    with Engine(runner) as engine:
        with pytest.raises(KeyboardInterrupt):
            engine.generate([[1], [2]], SamplingParams(max_tokens=100))
        monkeypatch.undo()
        may.set()
        while engine.stats.finished == 0 or engine.stats.waiting + engine.stats.running:
            time.sleep(0.001)
        assert engine.stats.steps < 5


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", math.nan),
        ("temperature", -1),
        ("temperature", True),
        ("top_k", 1.5),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("repetition_penalty", 0),
        ("presence_penalty", 3),
        ("frequency_penalty", math.inf),
        ("logit_bias", {1: math.nan}),
        ("logprobs", 21),
        ("seed", -1),
        ("n", 0),
        ("max_tokens", 0),
        ("stop", [""]),
        ("stop_token_ids", [-2]),
        ("min_tokens", -1),
        ("deadline", math.nan),
        ("priority", "high"),
    ],
)
def test_a_bad_parameter_is_named(field: str, value: object) -> None:
    with pytest.raises(PykernelsError, match=f"^{field}"):
        SamplingParams(**{field: value})  # type: ignore[arg-type]
