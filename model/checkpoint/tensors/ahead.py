"""Reading ahead: what comes next is read on other threads while the workers pack."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

ROOM = 64 << 20
"""Bytes that wait to be packed, at most (one item, if that is larger)."""
READERS = 4
"""Threads: one alone leaves most of an NVMe disk idle."""


def ahead(make: Callable[[int], T], count: int, nbytes: int) -> Iterator[T]:
    """``make(0)``, ``make(1)`` ... in order, made before they are asked for.

    Args:
        nbytes: that one of them takes.
    """
    depth = max(1, min(2 * READERS, ROOM // max(1, nbytes)))
    waiting: deque[Future[T]] = deque()
    with ThreadPoolExecutor(min(depth, READERS), "reader") as readers:
        try:
            for i in range(count):
                waiting.append(readers.submit(make, i))
                if len(waiting) > depth:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:  # an error, or nobody listens any more
            for future in waiting:
                future.cancel()
