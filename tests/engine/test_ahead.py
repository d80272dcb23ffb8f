"""Steps that are scheduled while the one before runs: what is drawn is the same."""

from __future__ import annotations

import random
from collections.abc import Callable, Set

import pytest

from pykernels.errors import PykernelsError
from runtime.engine import (
    Completion,
    DeviceLost,
    Engine,
    EngineConfig,
    RequestHandle,
    SamplingParams,
    StepBatch,
    StepResult,
)
from runtime.runner.constraint import Mask

from .fake_runner import FakeRunner, Words, check_pages, expected

WORDS = ("a", "b", "ab", "c", "ba", "caa", "bb")


class Logged(FakeRunner):
    """Notes what happens when."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.log: list[str] = []
        self.broken: Exception | None = None
        self.meanwhile: Callable[[], object] = lambda: None

    def launch(self, batch: StepBatch) -> None:
        if self.broken is not None:
            raise self.broken
        self.log.append("launch")
        super().launch(batch)

    def launch_behind(self, batch: StepBatch, ends: Set[int]) -> bool:
        behind = super().launch_behind(batch, ends)
        if behind:
            self.log.append("behind")
        return behind

    def step(self, batch: StepBatch) -> StepResult:
        self.log.append("result")
        self.meanwhile()
        return super().step(batch)


def random_params(rng: random.Random, seed: int) -> SamplingParams:
    count, scored = rng.randrange(1, 30), rng.random() < 0.3
    return SamplingParams(
        seed=seed,
        max_tokens=count,
        min_tokens=rng.randrange(count + 1) if rng.random() < 0.4 else 0,
        stop=("bbc", "caa", "cc") if rng.random() < 0.4 else (),
        stop_token_ids=rng.sample(range(97), rng.choice((0, 0, 8))),
        ignore_eos=rng.random() < 0.2,
        repetition_penalty=rng.choice((1.0, 1.1)),
        logprobs=2 if scored else None,
        logprob_start=1 if scored and rng.random() < 0.5 else None,
        n=rng.choice((1, 1, 1, 3)),
        priority=rng.randrange(2),
    )


def outputs(overlap: bool) -> list[Completion]:
    """Those of 150 requests that come while others run, with too few pages for all."""
    rng = random.Random(11)
    runner = FakeRunner(num_pages=30, vocab_size=97, max_num_batched_tokens=24)
    engine = Engine(
        runner,
        threaded=False,
        eos_token_ids=[5],
        detokenizer=lambda: Words(WORDS),
        config=EngineConfig(overlap=overlap),
    )
    trunk = [rng.randrange(97) for _ in range(30)]
    handles: list[RequestHandle] = []
    for seed in range(150):
        prompt = trunk[: rng.choice((0, 9, 25))] + [rng.randrange(97) for _ in range(1 + seed % 9)]
        handles.append(engine.submit(prompt, random_params(rng, 1000 * seed)))
        for _ in range(rng.randrange(6)):
            engine.step()
    while engine.step():
        pass
    stats = engine.stats
    assert stats.preemptions > 0 and stats.cached_tokens > 100
    check_pages(engine._core.scheduler.manager, [])
    return [completion for handle in handles for completion in handle.result().completions]


def test_every_request_gets_the_same_with_and_without_overlap() -> None:
    reasons = set()
    for one, other in zip(outputs(True), outputs(False), strict=True):
        assert (one.token_ids, one.text, one.finish_reason) == (
            other.token_ids,
            other.text,
            other.finish_reason,
        )
        assert (one.logprobs, one.prompt_logprobs) == (other.logprobs, other.prompt_logprobs)
        reasons.add(one.finish_reason)
    assert reasons == {"stop", "length"}


def test_the_next_step_is_launched_before_tokens_are_delivered() -> None:
    runner = Logged()

    class Told(Words):
        def push(self, token: int) -> str:
            runner.log.append("text")
            return super().push(token)

    engine = Engine(runner, threaded=False, detokenizer=lambda: Told(WORDS))
    engine.generate([[1]], SamplingParams(seed=1, max_tokens=4, stop="zzz"))
    first = ["launch", "result", "launch", "text"]
    later = ["behind", "result", "text"] * 2
    assert runner.log == [*first, *later, "result", "text"], "nothing after the last token"


def test_masks_are_made_while_the_next_step_runs() -> None:
    runner = Logged()

    class Anything:
        def begin(self) -> Anything:
            return self

        def allowed(self, mask: Mask) -> None:
            mask[:] = -1

        def accept(self, token: int) -> None:
            runner.log.append("mask")

    class Told(Words):
        def push(self, token: int) -> str:
            runner.log.append("text")
            return super().push(token)

    engine = Engine(runner, threaded=False, detokenizer=lambda: Told(WORDS))
    engine.generate([[1]], SamplingParams(seed=1, max_tokens=3, stop="zzz", constraint=Anything()))
    between = ["result", "launch", "mask", "text"] * 2
    assert runner.log == ["launch", *between, "result", "text"]


def test_what_comes_while_a_step_runs_is_in_the_next() -> None:
    runner = Logged()
    engine = Engine(runner, threaded=False)
    first = engine.submit([1], SamplingParams(seed=1, max_tokens=9))
    engine.step()
    late: list[RequestHandle] = []
    runner.meanwhile = lambda: (
        late or late.append(engine.submit([7] * 5, SamplingParams(seed=2, max_tokens=3)))
    )
    assert first.result().token_ids == expected([1], 1, 9)
    assert late[0].result().token_ids == expected([7] * 5, 2, 3)
    assert runner.sizes[:4] == [1, 1, 1 + 5, 2]


def test_an_end_token_leaves_no_row_behind() -> None:
    runner = FakeRunner()
    whole = expected([3], 3, 20)
    engine = Engine(runner, threaded=False, eos_token_ids=[whole[6]])
    engine.generate([[3], [4]], [SamplingParams(seed=s, max_tokens=15) for s in (3, 4)])
    assert tuple(runner.drawn[3]) == whole[:7]


def test_pages_of_a_failed_step_are_not_shared() -> None:
    runner = FakeRunner(max_num_batched_tokens=64)
    engine = Engine(runner, threaded=False)
    runner.fail_next = ValueError("no luck")
    trunk = list(range(40))
    one = engine.submit([*trunk, 1], SamplingParams(seed=1, max_tokens=5))
    other = engine.submit([*trunk, 2], SamplingParams(seed=2, max_tokens=5))
    engine.step()  # the other one was scheduled on the first one's pages, then its step failed
    with pytest.raises(PykernelsError, match="no luck"):
        one.result()
    assert other.result().token_ids == expected([*trunk, 2], 2, 5)
    check_pages(engine._core.scheduler.manager, [])


def test_tokens_are_delivered_although_the_next_launch_fails() -> None:
    runner = Logged()
    engine = Engine(runner, threaded=False)
    handle = engine.submit([1], SamplingParams(seed=1, max_tokens=5))
    lost = DeviceLost("the GPU fell off the bus", "Load the model again")
    runner.meanwhile = lambda: setattr(runner, "broken", lost)
    assert next(handle).token_ids == expected([1], 1, 1)
    with pytest.raises(PykernelsError, match="fell off the bus"):
        next(handle)
    assert not engine.healthy
