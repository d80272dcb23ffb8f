"""Thousands of requests that come, stop and are cancelled: no page is lost, memory stays flat."""

from __future__ import annotations

import gc
import random

import pytest

from runtime.engine import Engine, RequestHandle, SamplingParams

from .fake_runner import FakeRunner, Words, check_pages

REQUESTS, TURN = 10_000, 1_000
WORDS = ("a", "b", " ", "stop", "\n")


@pytest.mark.all  # two thousand run in test_scheduling
def test_ten_thousand_requests_leak_no_page_and_no_memory() -> None:
    runner, random_ = FakeRunner(num_pages=48, max_num_batched_tokens=64), random.Random(3)
    engine = Engine(runner, threaded=False, detokenizer=lambda: Words(WORDS))
    held = []  # objects after each thousand
    for seed in range(REQUESTS):
        if seed % TURN == 0:
            gc.collect()
            held.append(len(gc.get_objects()))
        handle = submit(engine, random_, seed)
        for _ in range(random_.randrange(4)):
            engine.step()
        if random_.random() < 0.2:
            handle.cancel()
        runner.sizes.clear()  # its own notes, which do grow
        if seed % 100 == 0:
            while engine.step():
                pass
            runner.drawn.clear()
    while engine.step():
        pass
    stats = engine.stats
    assert stats.finished == REQUESTS and stats.waiting == stats.running == stats.failed_steps == 0
    assert stats.preemptions > 0
    check_pages(engine._core.scheduler.manager, [])
    assert held[-1] < held[1] + 500, f"objects after each {TURN} requests: {held}"


def submit(engine: Engine, random_: random.Random, seed: int) -> RequestHandle:
    prompt = [random_.randrange(3) for _ in range(random_.choice((1, 5, 20, 90)))]
    params = SamplingParams(
        seed=seed,
        max_tokens=random_.choice((1, 3, 10)),
        stop="stop" if random_.random() < 0.3 else (),
        repetition_penalty=random_.choice((1.0, 1.1)),
        priority=random_.randrange(2),
    )
    return engine.submit(prompt, params)
