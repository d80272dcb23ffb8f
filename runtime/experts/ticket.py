"""The ticket that ``RoutedExperts.submit`` returns and ``sync`` takes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from threading import Thread, current_thread
from typing import NamedTuple

import numpy as np
import torch

from ..workers.worker_pool import WorkerPool


class Ticket(NamedTuple):
    """A call in flight, to be given to ``sync``. It keeps alive what the workers write.

    Attributes:
        y: the result's [T, H].
        tokens: T.
        bytes: of weights that the call reads.
        partials: float32 [T, H] of each node, if there are several.
        pools: the pools that work on it,
        calls: and the call's number on each; empty once it was synced.
        of: identifies the ``RoutedExperts`` that it belongs to.
        owners: a log of the threads that sync it, under 0, 1, ...; None where one gave it up. A
            lock that Ctrl-C cannot leave held: an entry is added in one step under the GIL
            (``setdefault``), so that of two threads one gets it. Threads as objects, since the
            number of one that has ended may be used again.
        added: which parts of ``partials`` are added, see ``reduce``.
    """

    y: torch.Tensor
    tokens: int
    bytes: int
    partials: Sequence[torch.Tensor]
    pools: Sequence[WorkerPool]
    calls: list[int]
    of: object
    owners: dict[int, Thread | None]
    added: np.ndarray | None = None

    def take(self) -> bool:
        """Whether this thread may sync it, till ``leave``."""
        me, number = current_thread(), len(self.owners)
        last = self.owners.get(number - 1)
        if last is me:
            return True
        if last is not None and not _has_ended(last):
            return False
        return self.owners.setdefault(number, me) is me

    def leave(self) -> None:
        """Lets another thread sync it, if this one was to."""
        number = len(self.owners)
        if self.owners.get(number - 1) is current_thread():
            self.owners[number] = None

    @property
    def runs(self) -> bool:
        """Whether the call has not ended on every pool."""
        return any(pool.goes_on(call) for pool, call in zip(self.pools, self.calls, strict=False))


def _has_ended(thread: Thread) -> bool:
    """Whether a thread has ended, also one that Python did not start (its frames are gone then)."""
    return not thread.is_alive() or thread.ident not in sys._current_frames()
