"""Every test of the engine ends, or says where its threads hang."""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key


@pytest.fixture(autouse=True)
def ended_if_it_hangs(request: pytest.FixtureRequest) -> Iterator[None]:
    stderr = request.config.stash[fault_handler_stderr_fd_key]  # not the one that is captured
    faulthandler.dump_traceback_later(60, file=stderr, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
