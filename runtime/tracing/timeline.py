"""A recorded timeline as data: steps, and spans on lanes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..program.node import Node

ENGINE, CALLS, STREAM, COPIES, WORKER = "engine", "calls", "stream", "copies", "worker"
"""Kinds of lanes: the engine's thread, its calls of CUDA, a stream, copies of one direction, a
worker."""

WAIT, COPY = "wait", "copy"
"""The op of a span in which a lane waits; in which it moves what another device reads."""


@dataclass(frozen=True, order=True)
class Lane:
    """What does one thing at a time.

    Attributes:
        kind: one of the above.
        device: "cpu", "cuda:0", "ref".
        number: of the worker or the stream.
        name: as it is shown.
    """

    kind: str
    device: str
    number: int
    name: str


@dataclass(frozen=True, slots=True)
class Span:
    """From ``begin`` to ``end``, ns of the monotonic clock, a lane does one thing.

    Attributes:
        name: of the node, the kernel, the phase.
        op: the node's op, with the role of experts ("moe_ffn routed"); "copy", ``WAIT`` ...
        layer: of the node; None outside the layers.
        detail: which part of the node.
    """

    lane: Lane
    name: str
    op: str
    begin: int
    end: int
    layer: int | None = None
    detail: str = ""


@dataclass(frozen=True)
class Step:
    """One step of the engine.

    Attributes:
        kind: "decode", every sequence has one token; "prefill".
        begin, end: ns of the monotonic clock.
        T, S: its tokens and sequences.
    """

    kind: str
    begin: int
    end: int
    T: int
    S: int


@dataclass(frozen=True)
class Timeline:
    """What was recorded.

    Attributes:
        spans: of one lane in order; one lies within another (a wait within a task), or apart.
        title: what ran.
    """

    steps: tuple[Step, ...]
    spans: tuple[Span, ...]
    title: str = ""
    _lanes: list[Lane] = field(default_factory=list, repr=False, compare=False)

    @property
    def lanes(self) -> Sequence[Lane]:
        """The lanes that have spans, as they are shown: the engine, the GPUs, the workers."""
        if not self._lanes:
            order = {kind: i for i, kind in enumerate((ENGINE, CALLS, STREAM, COPIES, WORKER))}
            seen_lanes = {span.lane for span in self.spans}
            self._lanes.extend(
                sorted(seen_lanes, key=lambda lane: (order[lane.kind], lane.device, lane.number))
            )
        return self._lanes

    def within(self, steps: Iterable[Step]) -> list[Span]:
        """The spans in these steps, cut at their ends."""
        inside = []
        for step in steps:
            for span in self.spans:
                begin, end = max(span.begin, step.begin), min(span.end, step.end)
                if begin < end:
                    inside.append(
                        Span(span.lane, span.name, span.op, begin, end, span.layer, span.detail)
                    )
        return inside


def op_of(node: Node) -> str:
    """A node's op as spans name it."""
    return f"{node.op} {node.role}" if node.op == "moe_ffn" and node.role else node.op
