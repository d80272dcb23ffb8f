"""Launches that follow each other without the host in between: one CUDA graph."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any

import torch

from .launches.dense import Launch

_INTERPRETER = threading.Lock()


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
def _capturing(device: torch.device) -> torch.cuda.Stream:
    """The stream on which a GPU's launches are captured: one, since graphs share memory only within
    a stream. torch's own belongs to the GPU that captured first."""
    return torch.cuda.Stream(device)


class Segment:
    """Launches in order; once captured, a replay is one call.

    Args:
        device: "cuda:N"; launches on a "cpu" (Triton's interpreter) are never captured.
    """

    def __init__(self, launches: Sequence[Launch], device: torch.device) -> None:
        self.launches, self.device = tuple(launches), device
        self._graph: torch.cuda.CUDAGraph | None = None

    def run(self) -> None:
        """Launches everything; returns before it has run."""
        if self._graph is not None:
            self._graph.replay()
            return
        for launch in self.launches:
            launch()

    def capture(self, pool: Any) -> None:
        """Captures the launches, which have run before: what they compile is compiled.

        Args:
            pool: handle of memory for what they allocate. Graphs that never run at once may share
                one, since nothing that is allocated within a graph outlives it.
        """
        if self.device.type != "cuda" or not self.launches:
            return
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=_capturing(self.device)):
            for launch in self.launches:
                launch()
        self._graph = graph

    def drop(self) -> None:
        """From now on every launch is a call again."""
        self._graph = None
