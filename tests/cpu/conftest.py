"""A pool of one thread for each test, and a time limit."""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key

from runtime.workers.pool import WorkerPool

HANGS = 300.0
"""Seconds that a test may take. The longest compile for about ten on a slow machine."""


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(1) as made:
        yield made


@pytest.fixture(autouse=True)
def ended_if_it_hangs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compiled code that waits for ever cannot be interrupted by Ctrl-C or an alarm. So the process
    ends, and prints where its threads are."""
    stderr = request.config.stash[fault_handler_stderr_fd_key]  # not the one that is captured
    faulthandler.dump_traceback_later(HANGS, file=stderr, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
