"""Ranks that meet through torch.distributed: gloo between CPUs, NCCL between GPUs.

The groups are made here rather than by ``init_process_group``, which has one set of them in a
process: so ranks may be processes, or threads of one process.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pykernels.errors import PykernelsError

from ..runner.batch import DeviceLost
from .collectives import LIMIT_S, Communicator

BACKENDS = ("gloo", "nccl")


class ProcessGroups(Communicator):
    """One rank's end, over the group of all ranks.

    Args:
        store: that all ranks share: a ``dist.TCPStore`` between processes, a ``dist.HashStore``
            between threads.
        backend: of ``BACKENDS``; "nccl" is for tensors of the current GPU, each rank another one.
        limit_s: how long a rank waits for another one.

    Raises:
        PykernelsError: no such backend here; a rank that does not come.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        backend: str = "gloo",
        limit_s: float = LIMIT_S,
    ) -> None:
        self.rank, self.size, self.backend = rank, size, backend
        make = _backend(backend)
        limit = timedelta(seconds=limit_s)
        self._all: Any = ()
        with self._meeting():
            self._all = make(dist.PrefixStore("all", store), rank, size, limit)
            self._pairs = {
                (a, b): make(dist.PrefixStore(f"{a} to {b}", store), int(rank == b), 2, limit)
                for a in range(size)
                for b in range(size)
                if a != b and rank in (a, b)
            }
        self._sent: list[tuple[Any, list[torch.Tensor]]] = []

    def all_reduce(self, out: torch.Tensor, x: torch.Tensor, ranks: Sequence[int]) -> None:
        with self._meeting(ranks):
            out.copy_(x)
            self._all.allreduce([out]).wait()

    def all_gather(self, out: torch.Tensor, x: torch.Tensor, ranks: Sequence[int]) -> None:
        with self._meeting(ranks):
            self._all._allgather_base(out, x).wait()

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor, ranks: Sequence[int]) -> None:
        with self._meeting(ranks):
            self._all._reduce_scatter_base(out, x).wait()

    def all_to_all(
        self, out: Sequence[torch.Tensor], x: Sequence[torch.Tensor], ranks: Sequence[int]
    ) -> None:
        with self._meeting(ranks):
            counts = [[each.numel() for each in parts] for parts in (out, x)]
            sent = torch.cat([each.flatten() for each in x])
            came = sent.new_empty(sum(counts[0]))
            self._all.alltoall_base(came, sent, *counts).wait()
            for own, part in zip(out, came.split(counts[0]), strict=True):
                own.copy_(part.view(own.shape))

    def send(self, x: Sequence[torch.Tensor], peer: int) -> None:
        with self._meeting():
            self._sent = [one for one in self._sent if not one[0].is_completed()]
            group = self._pairs[self.rank, peer]
            for tag, each in enumerate(x):
                copy = _bytes(each).clone()  # which the rank may overwrite before it has left
                self._sent.append((group.send([copy], 1, tag), [copy]))

    def recv(self, out: Sequence[torch.Tensor], peer: int) -> None:
        with self._meeting():
            group = self._pairs[peer, self.rank]
            for tag, each in enumerate(out):
                group.recv([_bytes(each)], 0, tag).wait()

    def abort(self, error: BaseException) -> None:
        """Closes this rank's ends, at which the others' calls fail; its own fail from now on."""
        for group in (self._all, *self._pairs.values()):
            group.abort()
        del group
        self._sent.clear()
        self._pairs.clear()  # gloo closes a connection with the last that has it
        self._all = None

    @contextmanager
    def _meeting(self, ranks: Sequence[int] = ()) -> Iterator[None]:
        """Makes one line of what torch.distributed raises."""
        if ranks and tuple(ranks) != tuple(range(self.size)):
            raise PykernelsError(
                f"a group of the ranks {tuple(ranks)} of {self.size}", "Let all ranks meet"
            )
        if self._all is None:
            raise DeviceLost(f"rank {self.rank} has left the others", "Load the model again")
        try:
            yield
        except RuntimeError as error:
            line = str(error).splitlines()[0].partition(". ")[0]
            cause = re.sub(r"^\[[^]]*\] ", "", line)  # without the place in its source
            raise DeviceLost(
                f"rank {self.rank} meets the others no more: {cause}", "Load the model again"
            ) from None


def _backend(name: str) -> Callable[[dist.Store, int, int, timedelta], Any]:
    """Makes a group: (store, rank, size, time limit)."""
    if name not in BACKENDS:
        raise PykernelsError(f"no backend {name!r}", f"Use {' or '.join(BACKENDS)}")
    if not (dist.is_gloo_available() if name == "gloo" else dist.is_nccl_available()):
        raise PykernelsError(
            f"torch has no {name}", "Install a build of torch that has it, or use one rank"
        )
    if name == "gloo":
        return dist.ProcessGroupGloo
    return _nccl


def _nccl(store: dist.Store, rank: int, size: int, limit: timedelta) -> Any:
    """A group on the current GPU, connected at once: NCCL else waits for its peers in the first
    call, and two ranks that begin with different peers would wait for each other."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    group: Any = dist.ProcessGroupNCCL(store, rank, size, options)
    group.allreduce([torch.zeros(1, device="cuda")]).wait()
    return group


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x
