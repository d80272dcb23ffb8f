"""What ``RoutedExperts.submit`` gives, and ``sync`` takes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from threading import Thread, current_thread
from typing import NamedTuple

import numpy as np
import torch

from ..workers.worker import WorkerPool


class Ticket(NamedTuple):
    """A call in flight, to be given to ``sync``. It holds what the workers write.

    Attributes:
        y: the result's [T, H].
        tokens: T.
        bytes: of weights that the call reads.
        partials: float32 [T, H] of each node, if there are several.
        pools: those that work on it, each on
        calls: the one of this number; none once it was synced.
        of: the ``RoutedExperts`` it is of, by a mark of theirs.
        by: under 0, 1, ... who syncs it in turn: a thread, as an object, since the number of one
            that has ended may be another's; None where it has left. It only grows, in one step
            under the GIL (``setdefault``): of two threads that see the same turn one gets the next,
            and Ctrl-C leaves no lock held.
        added: of ``partials``, as ``reduce`` notes it.
    """

    y: torch.Tensor
    tokens: int
    bytes: int
    partials: Sequence[torch.Tensor]
    pools: Sequence[WorkerPool]
    calls: list[int]
    of: object
    by: dict[int, Thread | None]
    added: np.ndarray | None = None

    def take(self) -> bool:
        """Whether it is this thread that syncs it, till ``leave``."""
        me, turn = current_thread(), len(self.by)
        last = self.by.get(turn - 1)
        if last is me:
            return True
        if last is not None and not _has_ended(last):
            return False
        return self.by.setdefault(turn, me) is me

    def leave(self) -> None:
        """Another thread may sync it, if this one was about that."""
        turn = len(self.by)
        if self.by.get(turn - 1) is current_thread():
            self.by[turn] = None  # a signal's handler that came in between has said the same

    @property
    def runs(self) -> bool:
        """Whether a pool has not been waited for yet."""
        return any(pool.goes_on(call) for pool, call in zip(self.pools, self.calls, strict=False))


def _has_ended(thread: Thread) -> bool:
    """Ctrl-C may have kept it from leaving. Of one that Python has not started, its frames tell."""
    return not thread.is_alive() or thread.ident not in sys._current_frames()
