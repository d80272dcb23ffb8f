"""An engine lives as long as somebody has it, or waits for what it does; nobody has to close it."""

from __future__ import annotations

import threading
import time
import weakref
from pathlib import Path

import pytest

from runtime.engine import Engine, SamplingParams, StepBatch, StepResult

from .fake_runner import FakeRunner, expected
from .test_kv_tiers import engine_on


class Slow(FakeRunner):
    """Steps that take a moment, so that an engine can be dropped between two of them."""

    def step(self, batch: StepBatch) -> StepResult:
        time.sleep(0.001)
        return super().step(batch)


class Ends:
    """Tells whether engines have ended that were made after this.

    Engines of other tests' servers may run beside them.
    """

    NAMES = "engine", "kv blocks"

    def __init__(self) -> None:
        self._others = set(threading.enumerate())

    def __call__(self, *held: weakref.ref[object]) -> bool:
        """Whether all of it is freed within a moment, and the engines' threads end."""
        limit = time.monotonic() + 5
        while time.monotonic() < limit:
            threads = set(threading.enumerate()) - self._others
            running = any(thread.name in self.NAMES for thread in threads)
            if not running and all(each() is None for each in held):
                return True
            time.sleep(0.001)
        return False


@pytest.fixture
def ends() -> Ends:
    return Ends()


def test_an_engine_that_nobody_has_is_freed(ends: Ends) -> None:
    """One that is idle, beside a handle that has its result; and one that works for nobody."""
    runner = Slow()
    engine = Engine(runner)
    held = weakref.ref(runner), weakref.ref(engine)
    handle = engine.submit([1], SamplingParams(seed=1, max_tokens=3))
    assert handle.result().token_ids == expected([1], 1, 3)
    assert list(engine.stream([2], SamplingParams(seed=2, max_tokens=3)))
    del runner, engine
    assert ends(*held) and handle.result().token_ids == expected([1], 1, 3)

    runner = Slow()
    held = (weakref.ref(runner),)
    Engine(runner).submit([1], SamplingParams(seed=1, max_tokens=190))
    del runner
    assert ends(*held)


def test_who_waits_for_an_engine_keeps_it(ends: Ends) -> None:
    runner = Slow()
    held = weakref.ref(runner)
    handle = Engine(runner).submit([1], SamplingParams(seed=1, max_tokens=30))
    chunks = Engine(Slow()).stream([2], SamplingParams(seed=2, max_tokens=30))
    del runner
    assert handle.result().token_ids == expected([1], 1, 30)
    assert tuple(t for chunk in chunks for t in chunk.token_ids) == expected([2], 2, 30)
    del chunks
    assert ends(held)


def test_an_engine_with_a_disk_is_freed(ends: Ends, tmp_path: Path) -> None:
    runner = Slow()
    held = (weakref.ref(runner),)
    engine = engine_on(tmp_path, runner, threaded=True)
    assert engine.submit([1], SamplingParams(seed=1, max_tokens=9)).result()
    del runner, engine
    assert ends(*held)
