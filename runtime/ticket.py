"""What ``RoutedExperts.submit`` gives, and ``sync`` takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

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
    """

    y: torch.Tensor
    tokens: int
    bytes: int
    partials: Sequence[torch.Tensor]
    pools: Sequence[WorkerPool]
    calls: list[int]
    of: object

    @property
    def runs(self) -> bool:
        """Whether a pool has not been waited for yet."""
        return any(pool.goes_on(call) for pool, call in zip(self.pools, self.calls, strict=False))
