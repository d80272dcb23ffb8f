"""What the GPUs did, from torch's profiler (Kineto): its events as spans.

Replayed CUDA graphs show each of their kernels. Kineto's times are those of the system clock, and
the workers' those of the monotonic one; they are compared when the profiler starts.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from .timeline import CALLS, COPIES, COPY, STREAM, WAIT, Lane, Span

IDLE_NS = 2000
"""Gaps between two kernels of a stream that count as waiting: shorter ones are those of launches
within a graph."""

_ON_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
_CALLS = {"cuda_runtime", "cuda_driver"}
_WAITS = ("Synchronize", "WaitEvent")


class GpuActivity:
    """While it is entered, kernels, copies and calls of CUDA are recorded.

    Args:
        devices: that are waited for at both ends: "cuda:0" ...

    Attributes:
        events: those of a Kineto trace, when it has ended.
        offset_ns: what to take from their times for those of the monotonic clock.
    """

    def __init__(self, devices: Sequence[str]) -> None:
        self.devices = tuple(devices)
        self.events: list[dict[str, Any]] = []
        self.offset_ns = 0
        self._open = ExitStack()

    def __enter__(self) -> GpuActivity:
        self._synchronize()
        activities = [torch.profiler.ProfilerActivity.CUDA]
        self._profiler = self._open.enter_context(torch.profiler.profile(activities=activities))
        self.offset_ns = clock_offset()
        return self

    def __exit__(self, *_: object) -> None:
        self._synchronize()
        self._open.close()
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "kineto.json"
            self._profiler.export_chrome_trace(str(file))
            self.events = kineto_events(json.loads(file.read_text()))

    def _synchronize(self) -> None:
        for device in self.devices:
            torch.cuda.synchronize(device)


def clock_offset(tries: int = 32) -> int:
    """System clock less monotonic clock, ns: of several readings the one that took least."""
    offsets = []
    for _ in range(tries):
        before = time.monotonic_ns()
        system = time.time_ns()
        after = time.monotonic_ns()
        offsets.append((after - before, system - (before + after) // 2))
    return min(offsets)[1]


def kineto_events(trace: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The complete events of a Kineto trace, with ``begin`` and ``end`` in ns of its clock. Times
    in it are microseconds from ``baseTimeNanoseconds`` on."""
    base = int(trace.get("baseTimeNanoseconds", 0))
    events = []
    for event in trace["traceEvents"]:
        if event.get("ph") == "X" and event.get("cat") in _ON_GPU | _CALLS:
            begin = base + round(float(event["ts"]) * 1e3)
            end = begin + round(float(event.get("dur", 0)) * 1e3)
            events.append({**event, "begin": begin, "end": end})
    return events


def gpu_spans(events: Iterable[Mapping[str, Any]], offset_ns: int) -> list[Span]:
    """Kineto's events as spans, in order of time; what a stream waits for between two kernels is
    one too. A kernel's op is not known here: it is its name."""
    spans = []
    for event in sorted(events, key=lambda event: event["begin"]):
        args, name = event.get("args", {}), event["name"]
        begin, end = event["begin"] - offset_ns, event["end"] - offset_ns
        if event["cat"] in _CALLS:
            op = WAIT if any(word in name for word in _WAITS) else "launch"
            lane = Lane(CALLS, "cpu", int(event.get("tid", 0)), "CUDA calls")
            spans.append(Span(lane, name, op, begin, end))
            continue
        device, stream = f"cuda:{args.get('device', 0)}", int(args.get("stream", 0))
        if event["cat"] == "gpu_memcpy" and (way := _way(name)):
            number, text = way
            lane = Lane(COPIES, device, number, f"{device} {text}")
            spans.append(Span(lane, name, COPY, begin, end, detail=_bytes(args)))
            continue
        lane = Lane(STREAM, device, stream, f"{device} stream {stream}")
        op = name if event["cat"] == "kernel" else COPY
        spans.append(Span(lane, name, op, begin, end))
    return spans


def idle(spans: Sequence[Span]) -> list[Span]:
    """The gaps of each stream between two of its spans."""
    last: dict[Lane, int] = {}
    gaps = []
    for span in spans:
        if span.lane.kind != STREAM:
            continue
        before = last.get(span.lane)
        if before is not None and span.begin - before >= IDLE_NS:
            gaps.append(Span(span.lane, "wait", WAIT, before, span.begin))
        last[span.lane] = max(span.end, before or 0)
    return gaps


def _way(name: str) -> tuple[int, str] | None:
    """The lane of a copy over the link."""
    if "HtoD" in name:
        return 0, "copies to the GPU"
    if "DtoH" in name:
        return 1, "copies to the host"
    return None


def _bytes(args: Mapping[str, Any]) -> str:
    return f"{args['bytes']} bytes" if "bytes" in args else ""
