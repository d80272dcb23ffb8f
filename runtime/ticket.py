"""What ``RoutedExperts.submit`` gives, and ``sync`` takes."""

from __future__ import annotations

from collections.abc import Sequence
from threading import get_ident
from typing import NamedTuple

import numpy as np
import torch

from .workers import WorkerPool


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
        by: under 0 the thread that syncs it.
        added: of ``partials``, as ``reduce`` notes it.
    """

    y: torch.Tensor
    tokens: int
    bytes: int
    partials: Sequence[torch.Tensor]
    pools: Sequence[WorkerPool]
    calls: list[int]
    of: object
    by: dict[int, int]
    added: np.ndarray | None = None

    def take(self) -> bool:
        """Whether it is this thread that syncs it, till ``leave``."""
        me = get_ident()
        return self.by.setdefault(0, me) == me

    def leave(self) -> None:
        """Another thread may sync it, if this one was about that."""
        if self.by.get(0) == get_ident():
            self.by.clear()

    @property
    def runs(self) -> bool:
        """Whether a pool has not been waited for yet."""
        return any(pool.goes_on(call) for pool, call in zip(self.pools, self.calls, strict=False))
