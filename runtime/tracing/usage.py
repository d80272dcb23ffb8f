"""How busy each device was in recorded steps, and which ops took longest (SOSP'25 Figure 10)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

from .timeline import COPY, STREAM, WAIT, WORKER, Lane, Span, Step, Timeline

Intervals = NDArray[np.int64]
"""[n, 2], begin and end; in order and apart."""


@dataclass(frozen=True)
class OpTime:
    """One op of all lanes of a kind.

    Attributes:
        where: "CPU", or the stream's device.
        us: microseconds of a step in which a lane runs it.
        lane_us: summed over the lanes, waits within left out.
        spans: tasks or kernels in a step.
    """

    op: str
    where: str
    us: float
    lane_us: float
    spans: float


@dataclass(frozen=True)
class Usage:
    """Steps of one kind. Shares are of their time.

    Attributes:
        us: mean microseconds of a step; ``median_us``: the median.
        cpu: some worker computes; ``workers``: the mean of all workers.
        streams: some stream of a device computes, by device.
        both: a worker and a stream compute; ``neither``: none.
        copies: between devices, whatever else happens; no computing.
        engine: the engine's thread does something else than run the step.
        ops: longest first.
    """

    kind: str
    steps: int
    us: float
    median_us: float
    cpu: float
    workers: float
    streams: dict[str, float]
    both: float
    neither: float
    copies: float
    engine: float
    ops: tuple[OpTime, ...]


def usage(timeline: Timeline, kind: str) -> Usage | None:
    """The usage of all steps of a kind; None if there are none."""
    steps = [step for step in timeline.steps if step.kind == kind]
    if not steps:
        return None
    spans = timeline.within(steps)
    total = sum(step.end - step.begin for step in steps)
    busy = busy_of(span for span in spans if span.op != COPY)
    workers = [lane for lane in timeline.lanes if lane.kind == WORKER]
    cpu = union(busy[lane] for lane in workers if lane in busy)
    streams = {
        device: union(busy[lane] for lane in busy if (lane.kind, lane.device) == (STREAM, device))
        for device in sorted({lane.device for lane in timeline.lanes if lane.kind == STREAM})
    }
    gpu = union(streams.values())
    copies = union(busy_of(span for span in spans if span.op == COPY).values())
    both = length(cpu) + length(gpu) - length(union([cpu, gpu]))
    engine = sum(
        span.end - span.begin for span in spans if span.op in ("schedule", "inputs", "deliver")
    )
    return Usage(
        kind=kind,
        steps=len(steps),
        us=total / len(steps) / 1e3,
        median_us=median(step.end - step.begin for step in steps) / 1e3,
        cpu=length(cpu) / total,
        workers=sum(length(busy[w]) for w in workers if w in busy) / total / max(1, len(workers)),
        streams={device: length(intervals) / total for device, intervals in streams.items()},
        both=both / total,
        neither=1 - length(union([cpu, gpu])) / total,
        copies=length(copies) / total,
        engine=engine / total,
        ops=_ops(spans, steps),
    )


def busy_of(spans: Iterable[Span]) -> dict[Lane, Intervals]:
    """When each lane computes or copies: its spans without the waits in them."""
    runs: dict[Lane, list[tuple[int, int]]] = {}
    waits: dict[Lane, list[tuple[int, int]]] = {}
    for span in spans:
        of = waits if span.op == WAIT else runs
        of.setdefault(span.lane, []).append((span.begin, span.end))
    return {
        lane: without(merged(pairs), merged(waits.get(lane, []))) for lane, pairs in runs.items()
    }


def merged(pairs: Sequence[tuple[int, int]] | Intervals) -> Intervals:
    """Intervals that may overlap, as those that do not."""
    intervals = np.array(pairs, np.int64).reshape(-1, 2)
    intervals = intervals[np.argsort(intervals[:, 0], kind="stable")]
    if not len(intervals):
        return intervals
    ends = np.maximum.accumulate(intervals[:, 1])
    first = np.concatenate(([True], intervals[1:, 0] > ends[:-1]))
    last = np.concatenate((first[1:], [True]))
    return np.stack((intervals[first, 0], ends[last]), axis=1)


def union(parts: Iterable[Intervals]) -> Intervals:
    """What lies in any of them."""
    intervals = list(parts)
    return merged(np.concatenate(intervals) if intervals else [])


def without(whole: Intervals, holes: Intervals) -> Intervals:
    """What lies in ``whole`` and in no hole; the former may touch each other, but not overlap."""
    if not len(holes) or not len(whole):
        return whole
    # Between two holes everything of ``whole`` stays.
    begins = np.concatenate(([np.iinfo(np.int64).min], holes[:, 1]))
    ends = np.concatenate((holes[:, 0], [np.iinfo(np.int64).max]))
    rest = []
    for begin, end in whole.tolist():
        first = np.searchsorted(ends, begin, side="right")
        last = np.searchsorted(begins, end, side="left")
        for i in range(first, last):
            rest.append((max(begin, int(begins[i])), min(end, int(ends[i]))))
    return np.array(rest, np.int64).reshape(-1, 2)


def length(intervals: Intervals) -> int:
    """Time in them, ns."""
    return int((intervals[:, 1] - intervals[:, 0]).sum())


def _ops(spans: Sequence[Span], steps: Sequence[Step]) -> tuple[OpTime, ...]:
    groups: dict[tuple[str, str], list[Span]] = {}
    waits = [span for span in spans if span.op == WAIT and span.lane.kind == WORKER]
    for span in spans:
        if span.lane.kind in (WORKER, STREAM) and span.op != WAIT:
            where = "CPU" if span.lane.kind == WORKER else span.lane.device
            groups.setdefault((span.op, where), []).append(span)
    times = []
    for (op, where), some in groups.items():
        busy = busy_of([*some, *waits]) if where == "CPU" else busy_of(some)
        lanes = [busy[lane] for lane in {span.lane for span in some}]
        times.append(
            OpTime(
                op,
                where,
                length(union(lanes)) / len(steps) / 1e3,
                sum(length(lane) for lane in lanes) / len(steps) / 1e3,
                len(some) / len(steps),
            )
        )
    return tuple(sorted(times, key=lambda each: -each.us))
