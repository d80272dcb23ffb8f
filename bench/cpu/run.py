"""A whole run: every section for every format, peers in turn, one dictionary at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from bench.peers.catalog import PEERS
from pykernels.target import Target
from runtime.topology import Topology
from runtime.workload import RandomLayers, routings

from . import estimate
from .cases import ROUTINGS, Settings, layer_shape
from .machine import describe
from .peer_table import PeerTable
from .quiet import Watch
from .rows import Row
from .sections import Bench
from .skew import PER_EXPERT, skew, skew_shape

Step = Callable[[str, float, float], None]
"""Called before each part: its name, seconds' worth of parts done, seconds' worth in all."""

SECTIONS = ("table", "latency", "threads", "skew")
_REPEATS = 0.25  # share of the estimate that waiting for quiet and repeating may take


@dataclass(frozen=True)
class Part:
    """One step of a run.

    Attributes:
        name: for the bar, and for the list of disturbed parts.
        seconds: about how long.
        section: of the results that its rows belong to; "" if it only prepares.
        run: gives the rows.
    """

    name: str
    seconds: float
    section: str
    run: Callable[[], list[Row]]


class Run:
    """The parts of a run in order.

    Raises:
        PykernelsError: too little memory for the smallest layer.
    """

    def __init__(self, settings: Settings, target: Target) -> None:
        self.settings, self.target = settings, target
        self.shape = layer_shape(Topology.detect().memory_available, settings.quick)
        most_tokens = max(tokens.of(self.shape) for tokens in settings.tokens)
        self.peers = PeerTable(self.shape, target, settings.threads, most_tokens)
        self.bench = Bench(settings, target, self.shape, self.peers)
        self._weights: RandomLayers | None = None
        self.parts = [part for fmt in settings.formats for part in self._of_format(fmt)]
        self.parts.append(self._skew())

    @property
    def seconds(self) -> float:
        """About how long the parts take."""
        return sum(part.seconds for part in self.parts)

    def measure(self, step: Step) -> dict[str, Any]:
        """What ``report`` and ``plots`` show and what is kept as JSON."""
        found: dict[str, list[Row]] = {section: [] for section in SECTIONS}
        watch = Watch(_REPEATS * self.seconds)
        machine, done = describe(self.target), 0.0
        try:
            for part in self.parts:
                step(part.name, done, self.seconds)
                if part.section:
                    found[part.section] += watch.run(part.name, part.run)
                else:
                    part.run()
                done += part.seconds
        finally:
            self.peers.close()
        step("done", done, self.seconds)
        machine["versions"] |= self.peers.versions
        return {
            "schema": 2,
            "machine": machine,
            "shape": asdict(self.shape),
            "settings": asdict(self.settings),
            "disturbed": watch.disturbed,
            "untimed": self.bench.untimed(self.settings.formats),
            **found,
        }

    def _of_format(self, fmt: str) -> Iterator[Part]:
        bench, shape, settings = self.bench, self.shape, self.settings
        own = [p for p in PEERS if settings.peers and fmt in p.formats]
        first = fmt == settings.formats[0]
        starts = len(own) + (sum(not p.formats for p in PEERS) if first and settings.peers else 0)
        begin = estimate.WEIGHTS + starts * estimate.START
        yield Part(f"{fmt}: weights, peers", begin, "", partial(self._begin, fmt))
        for tokens in settings.tokens:
            T = tokens.of(shape)
            players = len(bench.timed_backends(fmt, T)) + len(bench.wanted_peers(fmt, T))
            yield Part(
                f"{fmt}: {tokens.count} tokens{' per expert' if tokens.per_expert else ''}",
                estimate.table(settings, shape, T, players),
                "table",
                lambda tokens=tokens: bench.table(self.weights, tokens),  # type: ignore[misc]
            )
        curve = estimate.latency(settings, shape, bench.latency_tokens(), 1)
        yield Part(f"{fmt}: latency", curve, "latency", lambda: bench.latency(self.weights))
        by_threads = estimate.threads(settings, shape, 1 + bool(own))
        yield Part(f"{fmt}: threads", by_threads, "threads", lambda: bench.threads(self.weights))

    def _skew(self) -> Part:
        formats = self.settings.formats
        fmt = "fp8" if "fp8" in formats else formats[0]
        kernel = self.bench.backends(fmt)[0][0]
        shape = skew_shape(self.shape)
        T = PER_EXPERT * shape.E // shape.topk
        seconds = estimate.WEIGHTS + 6 * (self.settings.rounds + 2) * (
            estimate.call(shape, T, self.settings.threads) / 3 + self.settings.turn
        )

        def measure() -> list[Row]:
            self._weights = None
            self.peers.close()
            return skew(fmt, kernel, self.shape, self.bench.pool, self.settings)

        return Part("scheduling under skew", seconds, "skew", measure)

    @property
    def weights(self) -> RandomLayers:
        """Those of the format at hand."""
        assert self._weights is not None
        return self._weights

    def _begin(self, fmt: str) -> list[Row]:
        """The weights of a format in the place of those before; its peers are started."""
        formats = self.settings.formats
        self.peers.retire(formats[formats.index(fmt) :])
        self._weights = None  # before the next are made
        self._weights = RandomLayers(self.shape, fmt, routings(self.shape, 1, "balanced", ROUTINGS))
        for peer in self.bench.wanted_peers(fmt, 1):
            self.peers.try_to_start(peer)
        return []
