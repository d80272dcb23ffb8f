"""A simulated step as a timeline, as real ones are recorded and drawn."""

from __future__ import annotations

from pathlib import Path

from runtime.devices.sim.step import Ran, SimulatedStep
from runtime.planning.placement import CPU
from runtime.tracing.perfetto import write_trace
from runtime.tracing.timeline import COPIES, STREAM, WAIT, WORKER, Lane, Span, Step, Timeline, op_of


def timeline(step: SimulatedStep, title: str, sequences: int = 1) -> Timeline:
    """The spans of a step: one lane for all workers, one for each stream of a GPU; what took no
    time is left out."""
    spans = [_span(ran) for ran in step.ran if ran.end > ran.begin]
    end = max((span.end for span in spans), default=0)
    spans.sort(key=lambda span: (span.lane, span.begin))
    return Timeline((Step("decode", 0, end, sequences, sequences),), tuple(spans), title)


def write(file: Path, step: SimulatedStep, title: str, sequences: int = 1) -> None:
    """Writes the step as a trace for ui.perfetto.dev.

    Raises:
        PykernelsError: the file cannot be written.
    """
    write_trace(timeline(step, title, sequences), file)


def _span(ran: Ran) -> Span:
    device, stream = ran.lane
    if device == CPU:
        lane = Lane(WORKER, device, 0, "workers")
    else:
        kind = COPIES if stream == "copies" else STREAM
        lane = Lane(kind, device, 0, f"{device} {stream}")
    op = WAIT if ran.node.op in ("wait", "submit") else op_of(ran.node)
    begin, end = round(ran.begin * 1e9), round(ran.end * 1e9)
    return Span(lane, ran.node.name, op, begin, end, ran.node.layer, ran.cost.bound)
