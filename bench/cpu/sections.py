"""The parts of a run: the table, latency by tokens, throughput by threads, scheduling under skew.

Each returns flat rows. A row that could not be measured has ``why`` instead of figures.
"""

from __future__ import annotations

from typing import Any

import torch

from bench.peers.catalog import PEERS
from bench.peers.client import PeerMissing
from pykernels.registry import kernels
from pykernels.shapes import MoEShape
from pykernels.target import Target
from runtime.pool import configure_default_pool

from .cases import Settings, Tokens, distinct, routings, thread_counts
from .ours import Ours, OurWeights
from .peer_table import PeerTable
from .rows import Row, figures, missing
from .static import StaticOurs
from .turns import Roofs, alternate, speedup

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

    def untimed(self, formats: tuple[str, ...]) -> list[str]:
        """One line for each backend that is not on the table, or not everywhere: why."""
        found: dict[str, list[str]] = {}
        slow: list[str] = []
        for fmt in formats:
            able, unable = self.backends(fmt)
            for name, why in unable.items():
                found.setdefault(f"{name}: {why}", []).append(fmt)
            if "generic" in able[1:]:
                slow.append(fmt)
        if slow:
            found[f"generic: timed up to {SLOW_TOKENS} tokens a call, seconds beyond"] = slow
        return [
            what if len(fmts) == len(formats) else f"{what} ({', '.join(fmts)})"
            for what, fmts in found.items()
        ]

    def table(self, weights: OurWeights, tokens: Tokens) -> list[Row]:
        """One group: every backend and every peer that ``weights.fmt`` is held against."""
        fmt, T = weights.fmt, tokens.of(self.shape)
        ids = routings(self.shape, T, "balanced")
        able, _ = self.backends(fmt)
        head = {"format": fmt, "tokens": T, "threads": self.pool.threads}
        rows: list[Row] = []
        players: dict[str, Any] = {}
        for name in able:
            if T > SLOW_TOKENS and name == "generic" and len(able) > 1:
                continue
            players[name] = Ours(weights, name)
            players[name].prepare(T, ids)
        wanted = [p for p in PEERS if self.settings.peers and p.matches(fmt, T)]
        for peer in wanted:
            try:
                players[peer.name] = self.peers.get(peer)
                players[peer.name].prepare(T, [routing.flatten().tolist() for routing in ids])
            except PeerMissing as error:
                players.pop(peer.name, None)
                rows.append(missing(head, peer.engine, peer.mode, str(error)))
        roofs = Roofs(self.pool, self.target)
        seen = alternate(players, roofs, self.settings.rounds, self.settings.turn)
        touched, compute = [distinct(routing) for routing in ids], roofs.compute
        timed = [p for p in wanted if p.name in seen and not seen[p.name].why]
        for name in (name for name in able if name in seen):
            nbytes = weights.bytes_per_expert
            row = figures(
                head, "pykernels", name, seen[name], touched, nbytes, self.shape, roofs,
                compute.get(name),
            )  # fmt: skip
            row["ratios"] = {p.name: round(speedup(seen[name], seen[p.name]), 3) for p in timed}
            rows.append(row)
        for peer in (p for p in wanted if p.name in seen):
            if seen[peer.name].why:
                rows.append(missing(head, peer.engine, peer.mode, seen[peer.name].why))
                continue
            # The roof is one of bf16 products: integer tiles have another.
            roof = max(compute.values(), default=None) if peer.mode == "bf16" else None
            size = peer.bytes_per_weight * self.shape.weights
            rows.append(
                figures(
                    head,
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

    def latency(self, weights: OurWeights) -> list[Row]:
        """Time of a call against tokens per expert, all experts active and equally busy."""
        rows: list[Row] = []
        able, _ = self.backends(weights.fmt)
        most = max([t.of(self.shape) for t in self.settings.tokens] + [self.shape.E])
        for n in LATENCY_TOKENS:
            T = n * self.shape.E // self.shape.topk
            if T > most:
                break
            players: dict[str, Any] = {}
            for name in able:
                if name == "generic" and len(able) > 1 and T > SLOW_TOKENS:
                    continue
                players[name] = Ours(weights, name)
                players[name].prepare(T, routings(self.shape, T, "even", count=1))
            seen = alternate(players, None, min(3, self.settings.rounds), self.settings.turn / 2)
            for name in players:
                ms = round(seen[name].median * 1e3, 4)
                row = {"format": weights.fmt, "backend": name, "per_expert": n, "tokens": T}
                rows.append({**row, "threads": self.pool.threads, "ms": ms})
        return rows

    def threads(self, weights: OurWeights) -> list[Row]:
        """GB/s of one token against threads, ours and the first kt-kernel mode of the format."""
        rows: list[Row] = []
        ids = routings(self.shape, 1, "balanced")
        touched = [distinct(routing) for routing in ids]
        kernel = self.backends(weights.fmt)[0][0]
        like = [p for p in PEERS if self.settings.peers and p.formats and p.matches(weights.fmt, 1)]
        for threads in thread_counts(self.settings.threads):
            self._use_threads(threads)
            ours = Ours(weights, kernel)
            ours.prepare(1, ids)
            players: dict[str, Any] = {"pykernels": ours}
            for peer in like[:1]:
                try:
                    players[peer.name] = self.peers.get(peer, threads)
                    players[peer.name].prepare(1, [routing.flatten().tolist() for routing in ids])
                except PeerMissing:
                    players.pop(peer.name, None)  # the table says why
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

    def skew(self, fmt: str, per_expert: int = 64) -> list[Row]:
        """Balanced and Zipf routing of the same FLOPs, each on the queue and on static shares."""
        E = self.shape.E
        shape = MoEShape(E, self.shape.H, self.shape.I, max(1, E // 8))
        weights, T = OurWeights(fmt, shape), per_expert * E // max(1, E // 8)
        kernel = self.backends(fmt)[0][0]
        players: dict[str, Any] = {}
        busiest = {}
        for kind in ("balanced", "zipf"):
            ids = routings(shape, T, kind, count=4)
            counts = torch.stack([torch.bincount(i.flatten(), minlength=E) for i in ids]).float()
            busiest[kind] = float((counts.amax(1) / counts.mean(1)).mean())
            for schedule in ("dynamic", "static"):
                one = Ours(weights, kernel)
                if schedule == "static":
                    one = StaticOurs(weights, kernel, self.pool)
                one.prepare(T, ids)
                players[f"{kind} {schedule}"] = one
        seen = alternate(players, None, self.settings.rounds, self.settings.turn)
        even = seen["balanced dynamic"].median
        return [
            {
                "format": fmt,
                "backend": kernel,
                "tokens": T,
                "topk": shape.topk,
                "threads": self.pool.threads,
                "routing": name.split()[0],
                "schedule": name.split()[1],
                "busiest": round(busiest[name.split()[0]], 2),
                "ms": round(one.median * 1e3, 3),
                "against_balanced": round(one.median / even, 3),
            }
            for name, one in seen.items()
        ]
