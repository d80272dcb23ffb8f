"""The peers that are up: started when first asked for, ended when no format needs them."""

from __future__ import annotations

import contextlib
from collections.abc import Collection

from bench.peers.catalog import Peer
from bench.peers.client import PeerMissing, PeerProcess
from pykernels.shapes import MoEShape
from pykernels.target import Target
from runtime.workload import layers_out_of_cache


class PeerTable:
    """Peers for one layer shape. A peer that could not start is not tried again.

    Args:
        max_tokens: the most tokens a call will have.
    """

    def __init__(self, shape: MoEShape, target: Target, threads: int, max_tokens: int) -> None:
        self._shape, self._target, self._threads = shape, target, threads
        self._max_tokens = max_tokens
        self._up: dict[tuple[Peer, int], PeerProcess] = {}
        self._down: dict[tuple[Peer, int], str] = {}
        self.versions: dict[str, str] = {}

    def get(self, peer: Peer, threads: int | None = None) -> PeerProcess:
        """The process of a peer. Raises PeerMissing with the reason if there is none."""
        key = peer, threads or self._threads
        if key in self._down:
            raise PeerMissing(self._down[key])
        if key not in self._up:
            try:
                self._up[key] = self._start(peer, key[1])
            except PeerMissing as error:
                self._down[key] = str(error)
                raise
            version = self._up[key].versions[peer.engine]
            self.versions[f"{peer.engine} (peer)"] = version
        return self._up[key]

    def try_to_start(self, peer: Peer) -> None:
        """Starts it if it is not up; one that cannot start says why when it is asked for."""
        with contextlib.suppress(PeerMissing):
            self.get(peer)

    def retire(self, formats: Collection[str]) -> None:
        """Ends the peers that none of ``formats`` needs, and those of another thread count."""
        for key in list(self._up):
            peer, threads = key
            needed = not peer.formats or set(peer.formats) & set(formats)
            if not formats or not needed or threads != self._threads:
                self._up.pop(key).close()

    def close(self) -> None:
        """Ends them all."""
        self.retire(())

    def _start(self, peer: Peer, threads: int) -> PeerProcess:
        if missing := self._target.lacks(peer.features):
            raise PeerMissing(f"this CPU lacks {', '.join(missing)}")
        nbytes = self._shape.E * self._shape.weights * peer.bytes_per_weight
        layers = layers_out_of_cache(self._target.l3, nbytes)
        return PeerProcess(peer, self._shape, threads, layers, self._max_tokens)
