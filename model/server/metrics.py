"""Figures for Prometheus."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ..llm import LLM

_TTFT = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Metrics:
    """What one server has measured; each has a registry of its own."""

    def __init__(self, llm: LLM, inside: Callable[[], float]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(llm))
        self.first = Histogram(
            "pykernels_time_to_first_token_seconds",
            "From a request's entry into the engine to its first token",
            buckets=_TTFT,
            registry=self.registry,
        )
        self.between = Histogram(
            "pykernels_inter_token_seconds",
            "Between two tokens of one output",
            buckets=_BETWEEN,
            registry=self.registry,
        )
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

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self.registry)


class Watch:
    """Takes the times of one request's chunks."""

    __slots__ = ("_last", "_metrics", "_started")

    def __init__(self, metrics: Metrics) -> None:
        self._metrics, self._started = metrics, time.perf_counter()
        self._last: dict[int, float] = {}

    def chunk(self, output: int) -> None:
        """A chunk of this output has come."""
        now, last = time.perf_counter(), self._last.get(output)
        self._last[output] = now
        if last is None:
            self._metrics.first.observe(now - self._started)
        else:
            self._metrics.between.observe(now - last)


_COUNTERS = {
    "steps": "Steps of the engine",
    "computed_tokens": "Tokens that went through the model",
    "prompt_tokens": "Prompt tokens of admitted requests",
    "cached_tokens": "Prompt tokens that were found in the prefix cache",
    "new_tokens": "Generated tokens",
    "preemptions": "Requests that gave their pages back and were computed again",
    "finished": "Outputs that have ended",
    "failed_steps": "Steps that failed",
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


class _EngineCollector:
    """Reads the engine's counts when it is asked."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def collect(self) -> Iterator[Metric]:
        stats = self._llm.engine.stats
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"pykernels_{name}", text, value=getattr(stats, name))
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(f"pykernels_{name}", text, value=getattr(stats, name))
        if (cache := self._llm.expert_cache) is not None:
            for name, text in _CACHE_COUNTERS.items():
                label = f"pykernels_expert_cache_{name}"
                yield CounterMetricFamily(label, text, value=getattr(cache, name))
        nbytes = self._llm.runner.weight_bytes
        text = (
            "Packed weights that a step of one token reads: times the rate of steps, bytes a second"
        )
        yield GaugeMetricFamily("pykernels_step_weight_bytes", text, value=nbytes)
        pages = self._llm.runner.num_pages
        yield GaugeMetricFamily("pykernels_pages", "Pages of the KV cache", value=pages)
