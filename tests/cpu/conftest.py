"""A pool of one thread for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from runtime.workers.pool import WorkerPool


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(1) as made:
        yield made
