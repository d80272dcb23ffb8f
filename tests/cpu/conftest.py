"""A pool of one worker, new for each test; and no test that hangs for ever."""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key

from runtime.workers.pool import WorkerPool

HANGS = 300.0
"""Seconds of a test. The longest compile for some ten on a slow machine."""


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(1) as made:
        yield made


@pytest.fixture(autouse=True)
def ended_if_it_hangs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Who waits in compiled code for a task that never ends hears neither Ctrl-C nor an alarm: the
    process ends then, and says where its threads are."""
    stderr = request.config.stash[fault_handler_stderr_fd_key]  # not the one that is captured
    faulthandler.dump_traceback_later(HANGS, file=stderr, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
