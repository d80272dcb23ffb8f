"""How ranks meet: what a collective of a program does, and between threads of this process."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence

import torch

from pykernels.errors import PykernelsError

from ..runner.batch import DeviceLost

LIMIT_S = 60.0
"""Seconds for which a rank waits for another one."""


class Communicator(ABC):
    """One rank's end of all collectives. Each call returns when ``out`` may be read and ``x``
    written again, in the order of a stream where the device has streams.

    Attributes:
        rank: of ``size``.

    Every method raises DeviceLost where a rank has failed, or does not come in time.
    """

    rank: int
    size: int

    @abstractmethod
    def all_reduce(self, out: torch.Tensor, x: torch.Tensor, ranks: Sequence[int]) -> None:
        """out = the sum of all members' x, in any one order."""

    @abstractmethod
    def all_gather(self, out: torch.Tensor, x: torch.Tensor, ranks: Sequence[int]) -> None:
        """out [members * N, ..] = the x [N, ..] of all members, in their order."""

    @abstractmethod
    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor, ranks: Sequence[int]) -> None:
        """out [N, ..] = this member's rows of the sum of all members' x [members * N, ..]."""

    @abstractmethod
    def all_to_all(
        self, out: Sequence[torch.Tensor], x: Sequence[torch.Tensor], ranks: Sequence[int]
    ) -> None:
        """out[i] = what member i has sent to this one; x[i]: for member i."""

    @abstractmethod
    def send(self, x: Sequence[torch.Tensor], peer: int) -> None:
        """Sends tensors to a rank, which need not receive them yet."""

    @abstractmethod
    def recv(self, out: Sequence[torch.Tensor], peer: int) -> None:
        """Receives tensors of these shapes from a rank."""

    def abort(self, error: BaseException) -> None:
        """Tells all ranks that this one has failed: nobody waits for it any more."""
        return


class ThreadGroup:
    """Ranks that are threads of this process, over CPU tensors.

    Args:
        limit_s: how long a rank waits for another one.

    Attributes:
        ranks: the ends, by rank.
    """

    def __init__(self, size: int, limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        self._changed = threading.Condition()
        self._mail: dict[tuple[object, ...], deque[list[torch.Tensor]]] = {}
        self._failed: tuple[int, BaseException] | None = None
        self.ranks = [_Thread(self, rank, size) for rank in range(size)]

    def put(self, x: Sequence[torch.Tensor], key: tuple[object, ...]) -> None:
        """Puts copies where ``take`` finds them."""
        copies = [each.clone() for each in x]
        with self._changed:
            self._mail.setdefault(key, deque()).append(copies)
            self._changed.notify_all()

    def take(self, key: tuple[object, ...], source: int) -> list[torch.Tensor]:
        """What was put first under a key, by rank ``source``.

        Raises:
            DeviceLost: a rank has failed; it comes too late.
        """
        with self._changed:
            came = self._changed.wait_for(
                lambda: self._failed is not None or bool(self._mail.get(key)), self._limit_s
            )
            if self._failed is not None:
                raise DeviceLost(*lost(*self._failed))
            if not came:
                raise DeviceLost(
                    f"rank {source} has sent nothing for {self._limit_s:g} s",
                    "Look at what it does; load the model again",
                )
            return self._mail[key].popleft()

    def fail(self, rank: int, error: BaseException) -> None:
        """Ends the waiting of all ranks, now and later; the first failure counts."""
        with self._changed:
            self._failed = self._failed or (rank, error)
            self._changed.notify_all()


def lost(rank: int, error: BaseException) -> tuple[str, str]:
    """Cause and hint for the ranks that were to meet one that has failed."""
    cause = error.cause if isinstance(error, PykernelsError) else str(error)
    return f"rank {rank} has failed: {cause or type(error).__name__}", "Load the model again"


class _Thread(Communicator):
    """One of a ``ThreadGroup``. All collectives are messages between pairs; sums are in the order
    of the ranks, so that all get the same bits."""

    def __init__(self, group: ThreadGroup, rank: int, size: int) -> None:
        self._group, self.rank, self.size = group, rank, size

    def all_reduce(self, out: torch.Tensor, x: torch.Tensor, ranks: Sequence[int]) -> None:
        out.copy_(_sum(self._exchange([x] * len(ranks), ranks)))

    def all_gather(self, out: torch.Tensor, x: torch.Tensor, ranks: Sequence[int]) -> None:
        out.copy_(torch.cat(self._exchange([x] * len(ranks), ranks)))

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor, ranks: Sequence[int]) -> None:
        out.copy_(_sum(self._exchange(x.chunk(len(ranks)), ranks)))

    def all_to_all(
        self, out: Sequence[torch.Tensor], x: Sequence[torch.Tensor], ranks: Sequence[int]
    ) -> None:
        for own, came in zip(out, self._exchange(x, ranks), strict=True):
            own.copy_(came)

    def send(self, x: Sequence[torch.Tensor], peer: int) -> None:
        self._group.put(x, ("send", self.rank, peer))

    def recv(self, out: Sequence[torch.Tensor], peer: int) -> None:
        came = self._group.take(("send", peer, self.rank), peer)
        for own, x in zip(out, came, strict=True):
            own.copy_(x)

    def abort(self, error: BaseException) -> None:
        self._group.fail(self.rank, error)

    def _exchange(self, x: Sequence[torch.Tensor], ranks: Sequence[int]) -> list[torch.Tensor]:
        """Sends one tensor to each member; what each of them has sent to this one, in order."""
        for peer, each in zip(ranks, x, strict=True):
            self._group.put([each], (*ranks, self.rank, peer))
        return [self._group.take((*ranks, peer, self.rank), peer)[0] for peer in ranks]


def _sum(x: Sequence[torch.Tensor]) -> torch.Tensor:
    total = x[0]
    for each in x[1:]:
        total = total + each
    return total
