"""The experts on the CPU: the table, latency by tokens, throughput by threads (skew: ``skew.py``).

Each method returns rows. Peers that store other bytes have rows of their own beside ours.
"""

from __future__ import annotations

import contextlib
from typing import Any

from bench.cases.peers.table import PeerTable
from bench.harness.settings import ROUTINGS, Settings, Tokens, thread_counts
from bench.harness.timing.rows import Row, against, figures
from bench.harness.timing.turns import Times, alternate
from bench.peers.catalog import Peer
from bench.peers.client import PeerMissing
from pykernels.quant import get_format
from pykernels.registry import kernels
from pykernels.shapes import MoEShape
from pykernels.target import Target
from runtime.profiling.roofline import Roofs
from runtime.profiling.workload import RandomLayers, distinct, routings
from runtime.workers.pool import configure_default_pool

from .ours import Ours, split_name

PORTABLE = "generic"
SLOW_TOKENS = 8
"""Where a faster backend runs a format, the portable one is timed up to so many tokens a call."""

LATENCY_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class ExpertCases:
    """One layer on this machine, and the peers that are up.

    Args:
        peers: those that are up, or why not.
    """

    def __init__(
        self, settings: Settings, target: Target, shape: MoEShape, peers: PeerTable
    ) -> None:
        self.settings, self.target, self.shape, self.peers = settings, target, shape, peers
        self._use_threads(settings.threads)

    def _use_threads(self, threads: int) -> None:
        self.pool = configure_default_pool(threads)

    def backends(self, fmt: str) -> tuple[list[str], dict[str, str]]:
        """(those that run ``fmt`` here, fastest first; the others with the reason)."""
        reasons = {b.name: b.supports(fmt, self.target) for b in kernels()}
        able = [name for name, reason in reasons.items() if reason is None]
        return able, {name: reason for name, reason in reasons.items() if reason}

    def timed_backends(self, fmt: str, T: int) -> list[str]:
        """The backends whose calls of T tokens are timed; the portable one only where it is quick.

        The fastest one also with int8 activations where the format has them: "avx512/int8".
        """
        able, _ = self.backends(fmt)
        int8 = [f"{able[0]}/int8"] if get_format(fmt).int8_kind else []
        others = [name for name in able[1:] if name != PORTABLE or T <= SLOW_TOKENS]
        return able[:1] + int8 + others

    def untimed(self, formats: tuple[str, ...]) -> list[str]:
        """One line for each backend that is not on the table, or not everywhere: why."""
        found: dict[str, list[str]] = {}
        slow: list[str] = []
        for fmt in formats:
            able, unable = self.backends(fmt)
            for name, why in unable.items():
                found.setdefault(f"{name}: {why}", []).append(fmt)
            if PORTABLE in able[1:]:
                slow.append(fmt)
        if slow:
            found[f"{PORTABLE}: timed up to {SLOW_TOKENS} tokens a call, seconds beyond"] = slow
        return [
            what if len(fmts) == len(formats) else f"{what} ({', '.join(fmts)})"
            for what, fmts in found.items()
        ]

    def table(self, weights: RandomLayers, tokens: Tokens) -> list[Row]:
        """One group: every backend and every peer that ``weights.fmt`` is compared with."""
        fmt, T = weights.fmt, tokens.of(self.shape)
        ids = routings(self.shape, T, "balanced", ROUTINGS)
        touched = [distinct(routing) for routing in ids]
        able = self.timed_backends(fmt, T)
        players: dict[str, Any] = {}
        for name in able:
            players[name] = Ours(weights, name)
            players[name].prepare(T, ids)
        peers = {peer.name: peer for peer in self.settings.peers_of(fmt, T)}
        failed: dict[str, Times] = {}
        for name, peer in peers.items():
            try:
                players[name] = self.peers.ready(peer, T)
            except PeerMissing as error:
                failed[name] = Times(why=str(error))
        roofs = Roofs(self.pool, self.target)
        times = alternate(players, self.settings.rounds, self.settings.turn, roofs.sample) | failed
        theirs = {name: times[name] for name in peers}
        head = {"op": f"experts {fmt}", "format": fmt, "tokens": T}
        rows: list[Row] = []
        for name in able:
            figure = self._ours(name, times[name], T, touched, weights, roofs)
            rows.append(head | figure | against(times[name], theirs))
        # The roof is one of bf16 products: integer products have another.
        bf16 = [roofs.compute(name)[1] for name in able if "/" not in name]
        for name, peer in peers.items():
            if not times[name].why:
                roof = max(bf16, default=None) if peer.mode == "bf16" else None
                threads = players[name].threads
                rows.append(
                    head | self._theirs(peer, times[name], T, touched, threads, roofs, roof)
                )
        return rows

    def _flops(self, T: int) -> int:
        return 2 * T * self.shape.topk * self.shape.weights

    def _ours(
        self, name: str, times: Times, T: int, touched: list[int], weights: RandomLayers, roofs: Any
    ) -> Row:
        """Figures of a backend; only the bytes of distinct experts are counted."""
        backend, activations = split_name(name)
        nbytes = [weights.bytes_per_expert * n for n in touched]
        roof = roofs.compute(backend, activations)[1] or None
        row: Row = {"name": f"pykernels {name}", "threads": self.pool.threads}
        return row | figures(times, nbytes, self._flops(T), roofs.read, roof, activations)

    def _theirs(
        self,
        peer: Peer,
        times: Times,
        T: int,
        touched: list[int],
        threads: int,
        roofs: Any,
        roof: float | None,
    ) -> Row:
        """Figures of a peer, by the bytes that it stores."""
        nbytes = [peer.bytes_per_weight * self.shape.weights * n for n in touched]
        row: Row = {"name": peer.name, "engine": peer.engine, "threads": threads}
        return row | figures(times, nbytes, self._flops(T), roofs.read, roof)

    def latency_tokens(self) -> list[int]:
        """T of the calls of the latency curve, up to the most of the table."""
        most = max([t.of(self.shape) for t in self.settings.tokens] + [self.shape.E])
        calls = (n * self.shape.E // self.shape.topk for n in LATENCY_TOKENS)
        return [T for T in calls if T <= most]

    def latency(self, weights: RandomLayers) -> list[Row]:
        """Time of a call against tokens per expert, all experts active and equally busy."""
        rows: list[Row] = []
        roofs, fmt = Roofs(self.pool, self.target), weights.fmt
        roofs.sample()
        for T in self.latency_tokens():
            players: dict[str, Any] = {}
            ids = routings(self.shape, T, "balanced", count=1)
            for name in self.timed_backends(fmt, T):
                players[name] = Ours(weights, name)
                players[name].prepare(T, ids)
            times = alternate(players, min(3, self.settings.rounds), self.settings.turn / 2)
            expert_tokens = T * self.shape.topk // self.shape.E
            head = {"op": f"latency {fmt}", "format": fmt, "tokens": T, "per_expert": expert_tokens}
            touched = [distinct(routing) for routing in ids]
            rows += [
                head | self._ours(name, times[name], T, touched, weights, roofs) for name in players
            ]
        return rows

    def threads(self, weights: RandomLayers) -> list[Row]:
        """GB/s of one token against threads, ours and the first peer that stores weights so."""
        rows: list[Row] = []
        ids = routings(self.shape, 1, "balanced", ROUTINGS)
        touched, fmt = [distinct(routing) for routing in ids], weights.fmt
        kernel = self.backends(fmt)[0][0]
        head = {"op": f"threads {fmt}", "format": fmt, "tokens": 1}
        for threads in thread_counts(self.settings.threads):
            self._use_threads(threads)
            players: dict[str, Any] = {kernel: Ours(weights, kernel)}
            players[kernel].prepare(1, ids)
            like = {peer.name: peer for peer in self.settings.like(fmt)}
            for name, peer in like.items():
                with contextlib.suppress(PeerMissing):  # the table says why
                    players[name] = self.peers.ready(peer, 1, threads)
            roofs = Roofs(self.pool, self.target)
            rounds = min(3, self.settings.rounds)
            times = alternate(players, rounds, self.settings.turn, roofs.sample)
            rows.append(head | self._ours(kernel, times[kernel], 1, touched, weights, roofs))
            for name in players.keys() & like:
                if not times[name].why:
                    row = self._theirs(like[name], times[name], 1, touched, threads, roofs, None)
                    rows.append(head | row)
        self._use_threads(self.settings.threads)
        return rows
