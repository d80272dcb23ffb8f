"""A whole run on the CPU: every section for every format, peers in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from bench.cases.peers.table import PeerTable, can_start
from bench.harness import estimate
from bench.harness.machine import describe_cpu
from bench.harness.quiet import LIMIT, Watch
from bench.harness.settings import ROUTINGS, SECTIONS, Settings
from bench.harness.timing.rows import Row
from bench.peers.catalog import Peer
from bench.peers.memory import EXPERTS, layer_shape
from pykernels.target import Target
from runtime.machine.topology import Topology
from runtime.profiling.workload import RandomLayers, check_calls, routings

from .experts import ExpertCases
from .skew import PER_EXPERT, skew, skew_shape

Step = Callable[[str, float, float], None]
"""Called before each part: its name, seconds' worth of parts done, seconds' worth in all."""

_REPEATS = 0.25  # share of the estimate that waiting for quiet and repeating may take


@dataclass(frozen=True)
class RunPart:
    """One step of a run.

    Attributes:
        name: for the bar, and for the list of disturbed parts.
        seconds: about how long.
        run: gives the rows.
        prepares: it gives none, weights and peers are made.
        chooses: the peers' thread counts, perhaps the wrong ones where it is disturbed.
    """

    name: str
    seconds: float
    run: Callable[[], list[Row]]
    prepares: bool = False
    chooses: bool = False


class CpuRun:
    """The parts of a run in order.

    Attributes:
        fewer_experts: why memory has room for fewer than there should be; "" where it has not.

    Raises:
        PykernelsError: too little memory for the smallest layer, or for the longest calls.
    """

    def __init__(self, settings: Settings, target: Target) -> None:
        self.settings, self.target = settings, target
        self.step: Step = lambda *_: None
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
        self.experts = ExpertCases(settings, target, self.shape, self.peers)
        self._weights: RandomLayers | None = None
        of_section: dict[str, Callable[[], Iterator[RunPart]]] = {
            "table": self._table,
            "skew": self._skew,
            "latency": self._latency,
            "threads": self._threads,
        }
        self.parts = [part for name in settings.sections for part in of_section[name]()]
        self._left = [part.name for part in self.parts if not part.prepares]

    @property
    def seconds(self) -> float:
        """About how long the parts take."""
        return sum(part.seconds for part in self.parts)

    def rows(self) -> Iterator[list[Row]]:
        """The parts in order, up to the time limit; one that was disturbed is measured again."""
        self._watch = Watch(_REPEATS * self._limit(self.seconds))
        self._machine, self._start = describe_cpu(self.target), time.monotonic()
        done = 0.0
        try:
            for part in self.parts:
                if time.monotonic() - self._start >= self._limit(float("inf")):
                    break
                self.step(part.name, done, self.seconds)
                if not part.prepares:
                    found = self._watch.run(part.name, part.run)
                    self._left.remove(part.name)
                    yield found
                elif part.chooses:
                    self._watch.run(part.name, part.run, tries=1)
                else:
                    part.run()
                done += part.seconds
        finally:
            self.peers.close()
        self.step("done", done, self.seconds)

    def head(self) -> dict[str, Any]:
        """See ``harness.session``."""
        settings, shape, machine = self.settings, self.shape, self._machine
        minutes = round((time.monotonic() - self._start) / 60, 1)
        some = settings.sections if len(settings.sections) < len(SECTIONS) else ()
        return {
            "machine": {**machine, "versions": machine["versions"] | self.peers.versions},
            "headline": f"{machine['name']}, {settings.threads} of {machine['cores']} cores:"
            f" {shape.E} experts of {shape.H} x {shape.I}, top-{shape.topk}",
            "settings": asdict(settings)
            | {"shape": {name: getattr(shape, name) for name in ("E", "H", "I", "topk")}}
            | {"minutes_taken": minutes},
            "quick": settings.quick,
            "part": some,
            "notes": self._notes(),
            "missing": self._left,
            "why": f"{settings.minutes:g} minutes were over" if self._left else "",
        }

    def _notes(self) -> list[str]:
        notes = [f"{self.fewer_experts}."] if self.fewer_experts else []
        if self._left:
            notes.append(f"Not measured: {', '.join(self._left)}.")
        if {"table", "latency"} & set(self.settings.sections):  # the others time one backend
            untimed = self.experts.untimed(self.settings.formats)
            notes += [f"Not timed: {line}." for line in untimed]
        if disturbed := self._watch.disturbed:
            parts = ", ".join(f"{name} ({share:.0%})" for name, share in disturbed)
            notes.append(f"Disturbed: others used more than {LIMIT:.0%} of the CPU during {parts}.")
        return notes

    def _limit(self, seconds: float) -> float:
        return min(seconds, 60 * self.settings.minutes) if self.settings.minutes else seconds

    def _table(self) -> Iterator[RunPart]:
        experts, shape, settings = self.experts, self.shape, self.settings
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
            yield RunPart(f"{fmt}: weights, peers", begin, prepare, True, chooses=bool(peers))
            for tokens in settings.tokens:
                T = tokens.of(shape)
                players = len(experts.timed_backends(fmt, T)) + len(settings.peers_of(fmt, T))
                yield RunPart(
                    f"{fmt}: {tokens.in_words}",
                    estimate.table(settings, shape, T, players),
                    lambda tokens=tokens: experts.table(self.weights, tokens),  # type: ignore[misc]
                )

    def _latency(self) -> Iterator[RunPart]:
        experts, calls = self.experts, self.experts.latency_tokens()
        for fmt in self.settings.formats:
            players = len(experts.timed_backends(fmt, calls[-1]))
            seconds = estimate.latency(self.settings, self.shape, calls, players)
            yield self._make_weights(fmt)
            yield RunPart(f"{fmt}: latency", seconds, lambda: experts.latency(self.weights))

    def _threads(self) -> Iterator[RunPart]:
        for fmt in self.settings.formats:
            players = 1 + len(self.settings.like(fmt))
            seconds = estimate.threads(self.settings, self.shape, players)
            yield self._make_weights(fmt)
            yield RunPart(f"{fmt}: threads", seconds, lambda: self.experts.threads(self.weights))

    def _skew(self) -> Iterator[RunPart]:
        formats = self.settings.formats
        fmt = "fp8" if "fp8" in formats else formats[0]
        kernel = self.experts.backends(fmt)[0][0]
        shape = skew_shape(self.shape)
        T = PER_EXPERT * shape.E // shape.topk
        seconds = estimate.WEIGHTS + 6 * (self.settings.rounds + 2) * (
            estimate.call(shape, T, self.settings.threads) / 3 + self.settings.turn
        )

        def measure() -> list[Row]:
            self._weights = None
            self.peers.close()
            return skew(fmt, kernel, self.shape, self.experts.pool, self.settings, self.target)

        yield RunPart("scheduling under skew", seconds, measure)

    @property
    def weights(self) -> RandomLayers:
        """The weights of the format at hand."""
        assert self._weights is not None
        return self._weights

    def _make_weights(self, fmt: str) -> RunPart:
        return RunPart(f"{fmt}: weights", estimate.WEIGHTS, partial(self._begin, fmt), True)

    def _begin(self, fmt: str, peers: Collection[Peer] = ()) -> list[Row]:
        """The weights of a format in the place of those before, and beside them these peers."""
        self.peers.retire(peers)
        self._weights = None  # before the next are made
        self._weights = RandomLayers(self.shape, fmt, routings(self.shape, 1, "balanced", ROUTINGS))
        for peer in peers:
            self.peers.try_to_start(peer)
        return []
