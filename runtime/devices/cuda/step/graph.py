"""Launches that follow each other without the host in between: one CUDA graph, of one stream or
two."""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from ....program import Program
from ....program.analysis import on_streams
from ....program.ops import COPIES, OPS
from ..binders.dense import Launch

CAPTURE = threading.Lock()
"""Held while launches are captured: CUDA then refuses what other threads ask of events."""
_INTERPRETER = threading.Lock()
QUEUED = 1024
"""Launches of a graph of one stream that CUDA's queues take, whatever the GPU waits for; half as
many of two streams. On an H200 the host came back from a graph of 4,571 nodes in one stream, not
from 9,142; in two streams from 946 launches of a prompt's step, not from 1,066."""


def in_turn(launch: Launch, device: torch.device) -> Launch:
    """The launch, which in Triton's interpreter waits for those of other threads: it runs one
    kernel at a time."""
    if device.type == "cuda":
        return launch

    def alone() -> None:
        with _INTERPRETER:
            launch()

    return alone


@functools.cache
def _capturing(device: torch.device, high_priority: bool) -> torch.cuda.Stream:
    """The stream on which a GPU's launches are captured: one, since graphs share memory only within
    a stream. torch's own belongs to the GPU that captured first. Launches keep its priority."""
    return torch.cuda.Stream(device, priority=-1 if high_priority else 0)


@functools.cache
def _copying(device: torch.device, high_priority: bool) -> torch.cuda.Stream:
    """The second stream of all steps of a GPU none of which runs beside another, which are those of
    one priority: torch has but 32, and gives them out in turns."""
    return torch.cuda.Stream(device)


class _Pace:
    """Keeps the host at most twice ``AHEAD`` launches ahead of a stream: behind a full queue it
    would wait in the driver, and other threads with it."""

    AHEAD = 128

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream, self._count = stream, 0
        self._before: torch.cuda.Event | None = None

    def launched(self) -> None:
        """Called behind each launch."""
        self._count += 1
        if self._count % self.AHEAD == 0:
            event = torch.cuda.Event(blocking=True)
            event.record(self._stream)
            if self._before is not None:
                self._before.synchronize()
            self._before = event


@dataclass(frozen=True)
class CopyStream:
    """Which launches of a program are in a stream of their own, by their numbers.

    Attributes:
        launches: those.
        waits: by launch, the launches of the other stream that it waits for.
    """

    launches: frozenset[int] = frozenset()
    waits: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


def copy_stream(program: Program) -> CopyStream:
    """The nodes that only copy (``ops.COPIES``), and where they meet the others."""
    copies = frozenset(i for i, n in enumerate(program.nodes) if OPS[n.op].stream == COPIES)
    if not copies:
        return CopyStream()
    direct = on_streams(program).direct
    waits = {
        i: tuple(j for j in before if (j in copies) != (i in copies))
        for i, before in enumerate(direct)
    }
    return CopyStream(copies, {i: others for i, others in waits.items() if others})


class CapturedGraph:
    """Launches in order; once captured, a replay is one call.

    Args:
        device: "cuda:N"; launches on a "cpu" (Triton's interpreter) are never captured, and follow
            each other whatever their stream.
        copies: those that run in a second stream.
        high_priority: whether its kernels go before those of other graphs, once captured.
    """

    def __init__(
        self,
        launches: Sequence[Launch],
        device: torch.device,
        copies: CopyStream | None = None,
        high_priority: bool = False,
    ) -> None:
        self.launches, self.device = tuple(launches), device
        self._copies, self._high_priority = copies or CopyStream(), high_priority
        self._second: torch.cuda.Stream | None = None
        if self._copies.launches and device.type == "cuda":
            self._second = _copying(device, high_priority)
        self._graph: torch.cuda.CUDAGraph | None = None

    def run(self, paced: bool = False) -> None:
        """Launches everything; returns before it has run.

        Args:
            paced: not far ahead of the device, where it is not captured.
        """
        if self._graph is not None:
            self._graph.replay()
            return
        self._launch(paced)

    def capture(self, pool: Any) -> None:
        """Captures the launches, which have run before: what they compile is compiled.

        Args:
            pool: handle of memory for what they allocate. Graphs that never run at once may share
                one, since nothing that is allocated within a graph outlives it.
        """
        if self.device.type != "cuda" or not self.launches:
            return
        graph = torch.cuda.CUDAGraph()
        stream = _capturing(self.device, self._high_priority)
        with CAPTURE, torch.cuda.graph(graph, pool=pool, stream=stream):
            self._launch()
        self._graph = graph

    @property
    def is_captured(self) -> bool:
        """Whether it is launched by one call."""
        return self._graph is not None

    @property
    def fits_queues(self) -> bool:
        """Whether ``run`` returns at once, even while the GPU waits. Else it may wait in the driver
        until the GPU goes on; other threads launch meanwhile, on this GPU and on others."""
        streams = 1 if self._second is None else 2
        return self.is_captured and len(self.launches) * streams <= QUEUED

    def drop(self) -> None:
        """From now on every launch is a call again."""
        self._graph = None

    def first_stream(self) -> CapturedGraph:
        """Without what runs in the second stream: what the others take alone can be measured."""
        others = self._copies.launches
        own_launches = [launch for i, launch in enumerate(self.launches) if i not in others]
        return CapturedGraph(own_launches, self.device)

    def _launch(self, paced: bool = False) -> None:
        second = self._second
        if second is None and not paced:
            for launch in self.launches:
                launch()
            return
        first = torch.cuda.current_stream(self.device)
        launched = _Pace(first).launched if paced else lambda: None
        if second is None:
            for launch in self.launches:
                launch()
                launched()
            return
        second.wait_stream(first)  # a step begins when the one before has ended
        ends = {j: torch.cuda.Event() for others in self._copies.waits.values() for j in others}
        for i, launch in enumerate(self.launches):
            stream = second if i in self._copies.launches else first
            for j in self._copies.waits.get(i, ()):
                stream.wait_event(ends[j])
            with torch.cuda.stream(second) if stream is second else nullcontext():
                launch()
            if i in ends:
                ends[i].record(stream)
            launched()
        first.wait_stream(second)
