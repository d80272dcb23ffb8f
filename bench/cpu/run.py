"""A whole run: every section for every format, peers in turn, one dictionary at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from bench.peers.catalog import Peer
from pykernels.target import Target
from runtime.machine.topology import Topology
from runtime.profiling.workload import RandomLayers, check_calls, routings

from . import estimate
from .cases import ROUTINGS, SECTIONS, Settings
from .machine import describe
from .memory import EXPERTS, layer_shape
from .peer_table import PeerTable, can_start
from .quiet import Watch
from .rows import Row
from .sections import Bench
from .skew import PER_EXPERT, skew, skew_shape

Step = Callable[[str, float, float], None]
"""Called before each part: its name, seconds' worth of parts done, seconds' worth in all."""

Keep = Callable[[], None]
"""Called after each part that has given rows: ``Run.results`` has them."""

_REPEATS = 0.25  # share of the estimate that waiting for quiet and repeating may take


@dataclass(frozen=True)
class Part:
    """One step of a run.

    Attributes:
        name: for the bar, and for the list of disturbed parts.
        seconds: about how long.
        section: of the results that its rows belong to; "" if it only prepares.
        run: gives the rows.
        chooses: the peers' thread counts, perhaps the wrong ones where it is disturbed.
    """

    name: str
    seconds: float
    section: str
    run: Callable[[], list[Row]]
    chooses: bool = False


class Run:
    """The parts of a run in order.

    Attributes:
        fewer_experts: why memory has room for fewer than there should be; "" where it has not.

    Raises:
        PykernelsError: too little memory for the smallest layer, or for the longest calls.
    """

    def __init__(self, settings: Settings, target: Target) -> None:
        self.settings, self.target = settings, target
        self.shape, self.fewer_experts = layer_shape(
            Topology.detect().memory_available,
            target.l3,
            settings.formats,
            lambda fmt, shape: [p for p in settings.together(fmt, shape) if can_start(p, target)],
            most=EXPERTS[-1] if settings.quick else EXPERTS[0],
        )
        for tokens in settings.tokens:
            check_calls(self.shape, tokens.of(self.shape), ROUTINGS)
        self.peers = PeerTable(settings, self.shape, target)
        self.bench = Bench(settings, target, self.shape, self.peers)
        self._weights: RandomLayers | None = None
        of_section: dict[str, Callable[[], Iterator[Part]]] = {
            "table": self._table, "skew": self._skew,
            "latency": self._latency, "threads": self._threads,
        }  # fmt: skip
        self.parts = [part for name in settings.sections for part in of_section[name]()]
        self._found: dict[str, list[Row]] = {section: [] for section in SECTIONS}
        self._left = [part.name for part in self.parts if part.section]

    @property
    def seconds(self) -> float:
        """About how long the parts take."""
        return sum(part.seconds for part in self.parts)

    @property
    def begun(self) -> bool:
        """Whether anything has been measured."""
        return any(self._found.values())

    def measure(self, step: Step, keep: Keep) -> None:
        """Runs the parts in order, up to the time limit; ``results`` has their rows."""
        self._watch = Watch(_REPEATS * self._limit(self.seconds))
        self._machine, self._start = describe(self.target), time.monotonic()
        done = 0.0
        try:
            for part in self.parts:
                if time.monotonic() - self._start >= self._limit(float("inf")):
                    break
                step(part.name, done, self.seconds)
                if part.section:
                    self._found[part.section] += self._watch.run(part.name, part.run)
                    self._left.remove(part.name)
                    keep()
                elif part.chooses:
                    self._watch.run(part.name, part.run, tries=1)
                else:
                    part.run()
                done += part.seconds
        finally:
            self.peers.close()
        step("done", done, self.seconds)

    def results(self, ended: str = "") -> dict[str, Any]:
        """What ``report`` and ``plots`` show and what is kept as JSON; all that there is so far.

        Args:
            ended: why parts are missing; "" where only the time limit can be why.
        """
        settings = self.settings
        minutes = round((time.monotonic() - self._start) / 60, 1)
        versions = self._machine["versions"] | self.peers.versions
        backends = {"table", "latency"} & set(settings.sections)  # the others time one of them
        why = ended or f"{settings.minutes:g} minutes were over"
        return {
            "schema": 4,
            "machine": {**self._machine, "versions": versions, "minutes": minutes},
            "shape": asdict(self.shape),
            "fewer_experts": self.fewer_experts,
            "settings": asdict(settings),
            "missing": {"why": why if self._left else "", "parts": [*self._left]},
            "disturbed": self._watch.disturbed,
            "untimed": self.bench.untimed(settings.formats) if backends else [],
            **self._found,
        }

    def _limit(self, seconds: float) -> float:
        return min(seconds, 60 * self.settings.minutes) if self.settings.minutes else seconds

    def _table(self) -> Iterator[Part]:
        bench, shape, settings = self.bench, self.shape, self.settings
        tried: set[Peer] = set()
        up: set[Peer] = set()
        for fmt in settings.formats:
            peers = settings.together(fmt, shape)
            first, again = set(peers) - tried, tried & set(peers) - up
            begin = estimate.WEIGHTS + estimate.starts(settings, shape, first)
            begin += len(again) * estimate.START
            up = set(peers)
            tried |= up
            prepare = partial(self._begin, fmt, peers)
            yield Part(f"{fmt}: weights, peers", begin, "", prepare, chooses=bool(peers))
            for tokens in settings.tokens:
                T = tokens.of(shape)
                players = len(bench.timed_backends(fmt, T)) + len(settings.peers_of(fmt, T))
                yield Part(
                    f"{fmt}: {tokens.in_words}",
                    estimate.table(settings, shape, T, players),
                    "table",
                    lambda tokens=tokens: bench.table(self.weights, tokens),  # type: ignore[misc]
                )

    def _latency(self) -> Iterator[Part]:
        bench, calls = self.bench, self.bench.latency_tokens()
        for fmt in self.settings.formats:
            players = len(bench.timed_backends(fmt, calls[-1]))
            seconds = estimate.latency(self.settings, self.shape, calls, players)
            yield Part(f"{fmt}: weights", estimate.WEIGHTS, "", partial(self._begin, fmt))
            yield Part(f"{fmt}: latency", seconds, "latency", lambda: bench.latency(self.weights))

    def _threads(self) -> Iterator[Part]:
        bench = self.bench
        for fmt in self.settings.formats:
            players = 1 + len(self.settings.like(fmt))
            seconds = estimate.threads(self.settings, self.shape, players)
            yield Part(f"{fmt}: weights", estimate.WEIGHTS, "", partial(self._begin, fmt))
            yield Part(f"{fmt}: threads", seconds, "threads", lambda: bench.threads(self.weights))

    def _skew(self) -> Iterator[Part]:
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

        yield Part("scheduling under skew", seconds, "skew", measure)

    @property
    def weights(self) -> RandomLayers:
        """Those of the format at hand."""
        assert self._weights is not None
        return self._weights

    def _begin(self, fmt: str, peers: Collection[Peer] = ()) -> list[Row]:
        """The weights of a format in the place of those before, and beside them these peers."""
        self.peers.retire(peers)
        self._weights = None  # before the next are made
        self._weights = RandomLayers(self.shape, fmt, routings(self.shape, 1, "balanced", ROUTINGS))
        for peer in peers:
            self.peers.try_to_start(peer)
        return []
