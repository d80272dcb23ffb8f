"""The peers that are up: started when first asked for, ended when a format does not need them.

A peer is compared at the best of its thread counts: workers that spin take each other's cores
when there is one for every core. So each count is tried once, and the fastest stays.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Collection

from bench.harness.estimate import TRIAL
from bench.harness.settings import ROUTINGS, Settings
from bench.peers.catalog import Peer
from bench.peers.client import PeerMissing, PeerProcess, python_of
from bench.peers.memory import held_by, peer_layers
from pykernels.shapes import MoEShape
from pykernels.target import Target
from runtime.profiling.workload import routings


def check(peer: Peer, target: Target) -> None:
    """Raises PeerMissing for a peer that can never start here, with the reason."""
    if missing := target.lacks(peer.features):
        raise PeerMissing(f"this CPU lacks {', '.join(missing)}")
    if peer.unless and not target.lacks(peer.unless):
        raise PeerMissing(
            f"this CPU has {', '.join(peer.unless)}, for which there is a faster mode"
        )
    python_of(peer)


def can_start(peer: Peer, target: Target) -> bool:
    """Whether ``check`` has nothing against it."""
    try:
        check(peer, target)
    except PeerMissing:
        return False
    return True


class PeerTable:
    """Peers for one layer shape, never two processes of one peer at once.

    A peer that could not start on a number of threads is not tried on it again; one that failed on
    a call starts again for the next case.
    """

    def __init__(self, settings: Settings, shape: MoEShape, target: Target) -> None:
        self._settings, self._shape, self._target = settings, shape, target
        self._tokens = sorted({tokens.of(shape) for tokens in settings.tokens})
        self._up: dict[Peer, PeerProcess] = {}
        self._down: dict[tuple[Peer, int], str] = {}
        self._best: dict[Peer, int] = {}
        self.versions: dict[str, str] = {}

    def get(self, peer: Peer, threads: int | None = None) -> PeerProcess:
        """The process of a peer.

        Args:
            threads: how many it has; None: the best of those that it is tried on.

        Raises:
            PeerMissing: there is none; the message is the reason.
        """
        count = threads or self._best_of(peer)
        if (peer, count) in self._down:
            raise PeerMissing(self._down[peer, count])
        up = self._up.get(peer)
        if up and up.threads == count and not up.why:
            return up
        self._end(peer)
        try:
            started = self._up[peer] = self._start(peer, count)
        except PeerMissing as error:
            self._down[peer, count] = str(error)
            raise
        self.versions[f"{peer.engine} (peer)"] = started.versions[peer.engine]
        return started

    def ready(self, peer: Peer, T: int, threads: int | None = None) -> PeerProcess:
        """A peer that has the routings of calls of T tokens, balanced as ours: if it holds fewer
        experts, a call of its own still reads as many.

        Raises:
            PeerMissing: there is none, or it fails on them.
        """
        process = self.get(peer, threads)
        ids = routings(held_by(peer, self._shape), T, "balanced", ROUTINGS)
        process.prepare(T, [routing.flatten().tolist() for routing in ids])
        return process

    def try_to_start(self, peer: Peer) -> None:
        """Starts it if it is not up; one that cannot start says why when it is asked for."""
        with contextlib.suppress(PeerMissing):
            self.get(peer)

    def retire(self, needed: Collection[Peer]) -> None:
        """Ends all but those that are needed: the others' memory is for them."""
        for peer in self._up.keys() - needed:
            self._end(peer)

    def close(self) -> None:
        """Ends them all."""
        self.retire(())

    def _end(self, peer: Peer) -> None:
        if peer in self._up:
            self._up.pop(peer).close()

    def _best_of(self, peer: Peer) -> int:
        """The fastest of the counts that work, tried one after the other on first use.

        Raises:
            PeerMissing: none works, with the reasons.
        """
        counts = self._settings.threads_of(peer)
        if peer in self._best or len(counts) == 1:
            return self._best.get(peer, counts[0])
        tried: dict[int, tuple[int, float]] = {}
        for count in counts:
            with contextlib.suppress(PeerMissing):
                tried[count] = self._try(peer, count)
        if not tried:
            why = dict.fromkeys(self._down[peer, count] for count in counts)
            raise PeerMissing("; ".join(why))
        self._best[peer] = min(tried, key=lambda count: tried[count])
        return self._best[peer]

    def _try(self, peer: Peer, count: int) -> tuple[int, float]:
        """(how many cases failed, geometric mean of the others' median call): less is better.

        The cases are one token, where spinning and bandwidth decide, and the most tokens that the
        run asks of this peer, where products do.

        Raises:
            PeerMissing: not even one token works; it is not started on so many threads again.
        """
        most = max(
            (T for T in self._tokens if not peer.max_tokens or T <= peer.max_tokens), default=1
        )
        cases, medians = sorted({1, most}), []
        try:
            for T in cases:
                process = self.ready(peer, T, count)
                medians.append(statistics.median(took for _, took in process.turn(TRIAL)))
        except PeerMissing as error:
            self._end(peer)  # a driver that failed has ended
            if not medians:
                self._down[peer, count] = str(error)
                raise
        return len(cases) - len(medians), statistics.geometric_mean(medians)

    def _start(self, peer: Peer, threads: int) -> PeerProcess:
        check(peer, self._target)
        layers = peer_layers(peer, self._shape, self._target.l3)
        shape = held_by(peer, self._shape)
        return PeerProcess(peer, shape, threads, layers, self._tokens[-1])
