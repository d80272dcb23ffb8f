"""A timeline as a trace that ui.perfetto.dev and chrome://tracing open.

The Trace Event Format: complete events ("X") in microseconds, threads named by metadata ("M"). A
lane is a thread; lanes of one kind and device are a process.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from pykernels.errors import PykernelsError

from .timeline import CALLS, COPIES, ENGINE, STREAM, WORKER, Span, Timeline

_PROCESS = {
    ENGINE: "engine",
    CALLS: "engine",
    STREAM: "{device}",
    COPIES: "{device}",
    WORKER: "CPU workers",
}


def trace_events(timeline: Timeline) -> dict[str, Any]:
    """The trace as JSON's types; its times count from the first step."""
    start = min((step.begin for step in timeline.steps), default=0)
    names = {lane: _PROCESS[lane.kind].format(device=lane.device) for lane in timeline.lanes}
    pids = {name: i for i, name in enumerate(dict.fromkeys(("engine", *names.values())), 1)}
    tids = {lane: i for i, lane in enumerate(timeline.lanes, 1)}
    events: list[dict[str, Any]] = []
    for name, pid in pids.items():
        events.append(_meta("process_name", pid, 0, name=name))
        events.append(_meta("process_sort_index", pid, 0, sort_index=pid))
    events.append(_meta("thread_name", pids["engine"], 0, name="steps"))
    for lane, tid in tids.items():
        events.append(_meta("thread_name", pids[names[lane]], tid, name=lane.name))
        events.append(_meta("thread_sort_index", pids[names[lane]], tid, sort_index=tid))
    for number, step in enumerate(timeline.steps):
        told = {"step": number, "tokens": step.T, "sequences": step.S}
        events.append(
            _complete(step.kind, "step", step.begin - start, step.end - start, told)
            | {"pid": pids["engine"], "tid": 0}
        )
    for span in _shown(timeline):
        args: dict[str, Any] = {"node": span.name}
        if span.layer is not None:
            args["layer"] = span.layer
        if span.detail:
            args["detail"] = span.detail
        events.append(
            _complete(span.name, span.op, span.begin - start, span.end - start, args)
            | {"pid": pids[names[span.lane]], "tid": tids[span.lane]}
        )
    return {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {"title": timeline.title},
    }


def write_trace(timeline: Timeline, file: Path) -> None:
    """Writes the trace, compressed if the name ends in .gz.

    Raises:
        PykernelsError: the file cannot be written.
    """
    text = json.dumps(trace_events(timeline), separators=(",", ":")).encode()
    try:
        file.write_bytes(gzip.compress(text) if file.suffix == ".gz" else text)
    except OSError as error:
        raise PykernelsError(
            f"{file} cannot be written: {error.strerror}", "Give another --out"
        ) from None


def _shown(timeline: Timeline) -> list[Span]:
    """The spans that reach into the recorded steps: one for each task, however many steps it cuts;
    a wait that began before the first step begins with it."""
    if not timeline.steps:
        return []
    first, last = timeline.steps[0].begin, timeline.steps[-1].end
    shown = []
    for span in timeline.spans:
        begin, end = max(span.begin, first), min(span.end, last)
        if begin < end:
            shown.append(Span(span.lane, span.name, span.op, begin, end, span.layer, span.detail))
    return shown


def _complete(name: str, cat: str, begin: int, end: int, args: dict[str, Any]) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": cat,
        "ts": begin / 1e3,
        "dur": (end - begin) / 1e3,
        "args": args,
    }


def _meta(what: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": args}
