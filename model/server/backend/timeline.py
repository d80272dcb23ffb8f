"""A recorded timeline as JSON for the page."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from runtime.tracing.timeline import Span, Timeline
from runtime.tracing.usage import busy_of, length, usage

_GAP_NS = 2_000
"""Between two tasks of one node on one worker that are shown as one."""


def timeline_body(timeline: Timeline) -> dict[str, Any]:
    """Steps, lanes, and spans as lists: lane, op (an index of ``ops``), layer or None, begin, end,
    how many tasks. Times are us since the first step began; a lane is ``busy`` in that share of the
    steps."""
    within = timeline.within(timeline.steps)
    busy, total = busy_of(within), sum(step.end - step.begin for step in timeline.steps)
    zero = timeline.steps[0].begin if timeline.steps else 0
    lanes = {lane: i for i, lane in enumerate(timeline.lanes)}
    ops = sorted({span.op for span in timeline.spans})

    def us(ns: int) -> float:
        return round((ns - zero) / 1e3, 2)

    return {
        "steps": [
            {**asdict(step), "begin": us(step.begin), "end": us(step.end)}
            for step in timeline.steps
        ],
        "lanes": [
            {
                "kind": lane.kind,
                "device": lane.device,
                "name": lane.name,
                "busy": round(length(busy[lane]) / total, 4) if lane in busy else 0,
            }
            for lane in lanes
        ],
        "ops": ops,
        "spans": [
            [lanes[span.lane], ops.index(span.op), span.layer, us(span.begin), us(end), tasks]
            for span, end, tasks in _joined(within)
        ],
        "usage": {
            kind: asdict(usage_)
            for kind in ("decode", "prefill")
            if (usage_ := usage(timeline, kind)) is not None
        },
    }


def _joined(spans: list[Span]) -> list[tuple[Span, int, int]]:
    """Tasks of one node that follow each other, as one: the first, the end, their number."""
    joined: list[tuple[Span, int, int]] = []
    for span in sorted(spans, key=lambda span: (span.lane, span.begin)):
        if joined:
            first, end, tasks = joined[-1]
            same = (first.lane, first.name, first.op) == (span.lane, span.name, span.op)
            if same and span.begin - end < _GAP_NS:
                joined[-1] = first, max(end, span.end), tasks + 1
                continue
        joined.append((span, span.end, 1))
    return joined
