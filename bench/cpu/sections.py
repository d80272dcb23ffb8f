"""The parts of a run: the table, latency by tokens, throughput by threads (skew: ``skew.py``).

Each returns flat rows. A row that could not be measured has ``why`` instead of figures.
"""

from __future__ import annotations

import contextlib
from typing import Any

from bench.peers.client import PeerMissing
from pykernels.quant import get_format
from pykernels.registry import kernels
from pykernels.shapes import MoEShape
from pykernels.target import Target
from runtime.profiling.roofline import Roofs
from runtime.profiling.workload import RandomLayers, distinct, routings
from runtime.workers.pool import configure_default_pool

from .cases import ROUTINGS, Settings, Tokens, thread_counts
from .ours import Ours, split_name
from .peer_table import PeerTable
from .rows import Row, figures, missing
from .turns import alternate, speedup

PORTABLE = "generic"
SLOW_TOKENS = 8
"""Where a faster backend runs a format, the portable one is timed up to so many tokens a call."""

LATENCY_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Bench:
    """One run: its settings, machine, layer, and the peers that are up.

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
        """Those whose calls of T tokens are timed; the portable one only where it is quick.

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
        """One group: every backend and every peer that ``weights.fmt`` is held against."""
        fmt, T = weights.fmt, tokens.of(self.shape)
        ids = routings(self.shape, T, "balanced", ROUTINGS)
        able = self.timed_backends(fmt, T)
        head = {"format": fmt, "tokens": T, "threads": self.pool.threads}
        rows: list[Row] = []
        players: dict[str, Any] = {}
        for name in able:
            players[name] = Ours(weights, name)
            players[name].prepare(T, ids)
        wanted = self.settings.peers_of(fmt, T)
        for peer in wanted:
            try:
                players[peer.name] = self.peers.ready(peer, T)
            except PeerMissing as error:
                rows.append(missing(head, peer.engine, peer.mode, str(error)))
        roofs = Roofs(self.pool, self.target)
        seen = alternate(players, roofs, self.settings.rounds, self.settings.turn)
        touched = [distinct(routing) for routing in ids]
        timed = [p for p in wanted if p.name in seen and not seen[p.name].why]
        for name in able:
            nbytes = weights.bytes_per_expert
            row = figures(
                head, "pykernels", name, seen[name], touched, nbytes, self.shape, roofs,
                roofs.compute(*split_name(name))[1],
            )  # fmt: skip
            row["ratios"] = {p.name: round(speedup(seen[name], seen[p.name]), 3) for p in timed}
            rows.append(row)
        for peer in (p for p in wanted if p.name in seen):
            if seen[peer.name].why:
                rows.append(missing(head, peer.engine, peer.mode, seen[peer.name].why))
                continue
            theirs = head | {"threads": players[peer.name].threads}
            # The roof is one of bf16 products: integer products have another.
            bf16 = [roofs.compute(name)[1] for name in able if "/" not in name]
            roof = max(bf16, default=None) if peer.mode == "bf16" else None
            size = peer.bytes_per_weight * self.shape.weights
            rows.append(
                figures(
                    theirs,
                    peer.engine,
                    peer.mode,
                    seen[peer.name],
                    touched,
                    size,
                    self.shape,
                    roofs,
                    roof,
                )  # fmt: skip
            )
        return rows

    def latency_tokens(self) -> list[int]:
        """T of the calls of the latency curve, up to the most of the table."""
        most = max([t.of(self.shape) for t in self.settings.tokens] + [self.shape.E])
        calls = (n * self.shape.E // self.shape.topk for n in LATENCY_TOKENS)
        return [T for T in calls if T <= most]

    def latency(self, weights: RandomLayers) -> list[Row]:
        """Time of a call against tokens per expert, all experts active and equally busy."""
        rows: list[Row] = []
        for T in self.latency_tokens():
            players: dict[str, Any] = {}
            for name in self.timed_backends(weights.fmt, T):
                players[name] = Ours(weights, name)
                players[name].prepare(T, routings(self.shape, T, "balanced", count=1))
            seen = alternate(players, None, min(3, self.settings.rounds), self.settings.turn / 2)
            for name in players:
                ms = round(seen[name].median * 1e3, 4)
                n = T * self.shape.topk // self.shape.E
                row = {"format": weights.fmt, "backend": name, "per_expert": n, "tokens": T}
                rows.append({**row, "threads": self.pool.threads, "ms": ms})
        return rows

    def threads(self, weights: RandomLayers) -> list[Row]:
        """GB/s of one token against threads, ours and the first peer that stores weights so."""
        rows: list[Row] = []
        ids = routings(self.shape, 1, "balanced", ROUTINGS)
        touched = [distinct(routing) for routing in ids]
        kernel = self.backends(weights.fmt)[0][0]
        like = self.settings.like(weights.fmt)
        for threads in thread_counts(self.settings.threads):
            self._use_threads(threads)
            ours = Ours(weights, kernel)
            ours.prepare(1, ids)
            players: dict[str, Any] = {"pykernels": ours}
            for peer in like:
                with contextlib.suppress(PeerMissing):  # the table says why
                    players[peer.name] = self.peers.ready(peer, 1, threads)
            roofs = Roofs(self.pool, self.target)
            seen = alternate(players, roofs, min(3, self.settings.rounds), self.settings.turn)
            head = {"format": weights.fmt, "threads": threads, "read_roof": round(roofs.read, 2)}
            for name in (name for name in seen if not seen[name].why):
                size: float = weights.bytes_per_expert
                if name != "pykernels":
                    size = like[0].bytes_per_weight * self.shape.weights
                gbps = seen[name].rate([size * n / 1e9 for n in touched])
                rows.append({**head, "engine": name, "gbps": round(gbps, 2)})
        self._use_threads(self.settings.threads)
        return rows
