"""Figures for Prometheus."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from math import inf

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from ..backend.interface import Figures, ModelFacts

_TTFT = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Metrics:
    """What one server has measured; each has a registry of its own.

    Args:
        read_roof: GB/s that the workers read from memory at most; None: unknown.
    """

    def __init__(
        self, facts: ModelFacts, inside: Callable[[], float], read_roof: float | None = None
    ) -> None:
        self._facts, self._read_roof = facts, read_roof
        self.registry = CollectorRegistry()
        self.first = Histogram(
            "pykernels_time_to_first_token_seconds",
            "From a request's entry into the engine to its first token",
            _TTFT,
        )
        self.between = Histogram(
            "pykernels_inter_token_seconds", "Between two tokens of one output", _BETWEEN
        )
        self.registry.register(self.first)
        self.registry.register(self.between)
        entered = Gauge(
            "pykernels_inside",
            "Outputs of requests that have entered and whose answer is not yet sent",
            registry=self.registry,
        )
        entered.set_function(inside)
        self.responses = Counter(
            "pykernels_http_responses",
            "Answers by status",
            ("status",),
            registry=self.registry,
        )

    def watch(self) -> Watch:
        """A stopwatch for one request, which begins now."""
        return Watch(self)

    def text(self, figures: Figures) -> bytes:
        """Writes Prometheus' text format, with the engine's figures."""
        engine = CollectorRegistry()
        engine.register(_EngineCollector(figures, self._facts.num_pages, self._read_roof))
        return generate_latest(engine) + generate_latest(self.registry)


class Histogram(Collector):
    """Observations of the event loop's thread alone, counted for a tenth of what a lock takes.

    Args:
        bounds: upper bounds of the buckets, ascending.
    """

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name, self._text, self._bounds = name, text, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        """So many observations of one value."""
        self._counts[bisect_left(self._bounds, seconds)] += times
        self._sum += seconds * times

    def collect(self) -> Iterator[Metric]:
        up_to = accumulate(self._counts)
        buckets = [(str(float(b)), n) for b, n in zip((*self._bounds, inf), up_to, strict=True)]
        buckets[-1] = ("+Inf", buckets[-1][1])
        yield HistogramMetricFamily(self._name, self._text, buckets, self._sum)


class Watch:
    """Takes the times of one request's chunks."""

    __slots__ = ("_last", "_metrics", "_started")

    def __init__(self, metrics: Metrics) -> None:
        self._metrics, self._started = metrics, time.perf_counter()
        self._last: dict[int, float] = {}

    def chunk(self, output: int, tokens: int) -> None:
        """A chunk of this output has come, with so many tokens."""
        now, last = time.perf_counter(), self._last.get(output)
        self._last[output] = now
        if last is None:
            self._metrics.first.observe(now - self._started)
        elif tokens:
            self._metrics.between.observe((now - last) / tokens, tokens)


_COUNTERS = {
    "steps": "Steps of the engine",
    "computed_tokens": "Tokens that went through the model",
    "prompt_tokens": "Prompt tokens of admitted requests",
    "cached_tokens": "Prompt tokens that were found in the prefix cache",
    "new_tokens": "Generated tokens",
    "draft_tokens": "Drafts of next tokens that steps have checked",
    "accepted_tokens": "Drafts that were what was drawn",
    "preemptions": "Requests that gave their pages back and were computed again",
    "finished": "Outputs that have ended",
    "failed_steps": "Steps that failed",
    "parked_seconds": "Seconds for which steps of long prompts waited for those of short ones",
}
_GAUGES = {
    "waiting": "Outputs that wait for a place in the batch",
    "running": "Outputs in the batch",
    "free_pages": "Pages of the KV cache that hold nothing",
    "cached_pages": "Pages that only the prefix tree holds",
}


_CACHE_COUNTERS = {
    "choices": "Experts that tokens of decode steps chose",
    "hits": "Of those, experts that were in slots of the GPU",
    "swaps": "Experts that came into slots of the GPU",
}


_BLOCKS = {
    "read": "came from the level into pages",
    "missed": "prompts could have used and it did not have",
    "declined": "were faster to compute than to read",
    "damaged": "were not what they should be",
    "written": "were written",
    "dropped": "were to be written, and were not",
}


class _EngineCollector(Collector):
    """The engine's counts of one time."""

    def __init__(self, figures: Figures, num_pages: int, read_roof: float | None) -> None:
        self._figures, self._num_pages, self._read_roof = figures, num_pages, read_roof

    def collect(self) -> Iterator[Metric]:
        figures = self._figures
        for name, text in _COUNTERS.items():
            value = getattr(figures.stats, name)
            yield CounterMetricFamily(f"pykernels_{name}", text, value=value)
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(f"pykernels_{name}", text, value=getattr(figures.stats, name))
        for name, value in figures.cache.items():
            label = f"pykernels_expert_cache_{name}"
            yield CounterMetricFamily(label, _CACHE_COUNTERS[name], value=value)
        yield from self._levels()
        yield self._prompt_steps()
        yield from self._nodes()
        yield from self._speed()
        text = (
            "Packed weights that a step of one token reads: times the rate of steps, bytes a second"
        )
        yield GaugeMetricFamily("pykernels_step_weight_bytes", text, value=figures.weight_bytes)
        yield from self._reads()
        yield GaugeMetricFamily("pykernels_pages", "Pages of the KV cache", value=self._num_pages)

    def _prompt_steps(self) -> Metric:
        """Steps with prompts, by the way that was chosen for each."""
        steps = CounterMetricFamily(
            "pykernels_prompt_steps",
            "Steps with prompts; chunked: in the steps of the answers that are written, others: in"
            " steps of their own, on the same GPU (streamed), on all (dslp), on others"
            " (disaggregated)",
            labels=("route",),
        )
        for route, count in self._figures.stats.prompt_steps.items():
            steps.add_metric((route,), count)
        return steps

    def _levels(self) -> Iterator[Metric]:
        """Blocks and bytes of the levels that keep pages beyond the KV cache."""
        levels = self._figures.stats.kv_levels
        if not levels:
            return
        what = ", ".join(f"{name}: that {text}" for name, text in _BLOCKS.items())
        of = ("level", "what")
        blocks = CounterMetricFamily(
            "pykernels_kv_level_blocks",
            f"Pages and states, by what became of them; {what}",
            labels=of,
        )
        nbytes = CounterMetricFamily("pykernels_kv_level_bytes", "Bytes of them", labels=of)
        seconds = CounterMetricFamily(
            "pykernels_kv_level_seconds", "Seconds that moving them took, beside steps", labels=of
        )
        errors = CounterMetricFamily(
            "pykernels_kv_level_errors", "Errors of the level's device", labels=("level",)
        )
        for level, stats in levels.items():
            for name in _BLOCKS:
                blocks.add_metric((level, name), getattr(stats, name))
            nbytes.add_metric((level, "read"), stats.read_bytes)
            nbytes.add_metric((level, "written"), stats.written_bytes)
            seconds.add_metric((level, "read"), stats.read_seconds)
            seconds.add_metric((level, "written"), stats.write_seconds)
            errors.add_metric((level,), stats.failed)
        yield from (blocks, nbytes, seconds, errors)

    def _nodes(self) -> Iterator[Metric]:
        """What a router knows of its nodes."""
        if not self._figures.nodes:
            return
        of = ("node", "role")
        up = GaugeMetricFamily("pykernels_node_up", "Whether a node takes requests", labels=of)
        inside = GaugeMetricFamily("pykernels_node_outputs", "Outputs that it has now", labels=of)
        rate = GaugeMetricFamily(
            "pykernels_node_prompt_tokens_per_second", "At which it reads prompts", labels=of
        )
        asked = CounterMetricFamily(
            "pykernels_node_requests", "Prompts and outputs that it was asked for", labels=of
        )
        lost = CounterMetricFamily(
            "pykernels_node_lost", "Of these, those that another node had to do", labels=of
        )
        for node in self._figures.nodes:
            labels = node.name, node.role
            up.add_metric(labels, node.up)
            inside.add_metric(labels, node.inside)
            rate.add_metric(labels, node.rate)
            asked.add_metric(labels, node.requests)
            lost.add_metric(labels, node.lost)
        yield from (up, inside, rate, asked, lost)

    def _speed(self) -> Iterator[Metric]:
        """The first decode steps beside what was predicted for them."""
        if (speed := self._figures.speed) is None:
            return
        rate = GaugeMetricFamily(
            "pykernels_decode_tokens_per_second",
            "Of the first decode steps, of all their sequences: predicted, and measured",
            labels=("of", "sequences", "context"),
        )
        for of in ("predicted", "measured"):
            rate.add_metric((of, f"{speed.sequences}", f"{speed.context}"), getattr(speed, of))
        yield rate
        text = "Whether these differ by more than a fifth"
        yield GaugeMetricFamily("pykernels_decode_off_prediction", text, value=speed.is_off)

    def _reads(self) -> Iterator[Metric]:
        """Weights that steps without prompts have read."""
        read = CounterMetricFamily(
            "pykernels_decode_read_bytes",
            "Weights that the CPU has read in steps without prompts",
            labels=("of",),
        )
        every, experts = self._figures.read_bytes, self._figures.expert_bytes
        read.add_metric(("experts",), experts)
        read.add_metric(("others",), every - experts)
        yield read
        seconds = self._figures.stats.decode_seconds
        text = "Seconds of steps without prompts"
        yield CounterMetricFamily("pykernels_decode_step_seconds", text, value=seconds)
        if seconds:
            text = "Experts that steps without prompts have read, a second, since the start"
            rate = experts / seconds
            yield GaugeMetricFamily("pykernels_expert_read_bytes_per_second", text, value=rate)
        if self._read_roof is not None:
            roof = self._read_roof * 1e9
            text = "What the workers read from memory at most"
            yield GaugeMetricFamily("pykernels_read_roof_bytes_per_second", text, value=roof)
            if seconds:
                text = "Share of that roof at which such steps have read their weights"
                share = every / seconds / roof
                yield GaugeMetricFamily("pykernels_read_roof_share", text, value=share)
