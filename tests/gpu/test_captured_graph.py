"""The two streams of a captured graph: streams and events here only keep book of what is done."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from model.llm import meta_decoder
from runtime.devices.cuda.step import graph
from runtime.devices.cuda.step.graph import CapturedGraph, copy_stream
from runtime.passes import stream_weights
from runtime.passes.stream_weights import StreamRing
from runtime.program.analysis import dependencies
from runtime.program.sizes import StepSizes

from ..model import tiny
from .two_gpus import bound, sums, two_gpus


class Stream:
    """Knows which launches are done when its next one begins."""

    def __init__(self) -> None:
        self.done: set[int] = set()

    def wait_event(self, event: Event) -> None:
        assert event.done is not None, "it was not recorded yet"
        self.done |= event.done

    def wait_stream(self, other: Stream) -> None:
        self.done |= other.done


class Event:
    def __init__(self) -> None:
        self.done: set[int] | None = None

    def record(self, stream: Stream) -> None:
        self.done = set(stream.done)


@pytest.mark.parametrize("ring", [StreamRing(3, 2), StreamRing(4, 5)], ids=str)
def test_each_launch_begins_behind_those_that_share_its_buffers(
    ring: StreamRing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.make(tmp_path, "qwen3_moe", num_hidden_layers=4)
    program = meta_decoder(tmp_path).lower(StepSizes(8, 2, 2, 1, 1)).on("cuda:0")
    program = stream_weights(program, lambda spec: spec.nbytes, ring)
    first, second = Stream(), Stream()
    current, found = [first], dict[int, set[int]]()

    @contextmanager
    def within(stream: Stream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    def launch(i: int) -> None:
        found[i] = set(current[-1].done)
        current[-1].done.add(i)

    monkeypatch.setattr(graph, "_copying", lambda *_: second)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: first)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", within)
    numbers = range(len(program.nodes))
    CapturedGraph(
        [partial(launch, i) for i in numbers], torch.device("cuda"), copy_stream(program)
    ).run()
    for i, needed in enumerate(dependencies(program).direct):
        assert found[i].issuperset(needed), program.nodes[i].name
    assert first.done == set(numbers)
    at = {node.name: i for i, node in enumerate(program.nodes)}
    loaded_ahead = at["layer1.experts"] not in found[at[f"layer2.experts.load{ring.chunks - 1}"]]
    assert loaded_ahead == (ring.buffers > ring.chunks)


def test_a_thread_launches_no_further_ahead_than_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched, done = 0, 0

    class Marker:
        """The device runs only what somebody waits for."""

        def __init__(self, blocking: bool) -> None:
            assert blocking

        def record(self, stream: None) -> None:
            self.behind = launched

        def synchronize(self) -> None:
            nonlocal done
            done = self.behind

    def launch() -> None:
        nonlocal launched
        launched += 1
        assert launched - done <= 512  # CUDA's queue has room for 1,024

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Event", Marker)
    CapturedGraph([launch] * 2000, torch.device("cuda")).run(paced=True)
    assert launched == 2000


def test_graphs_longer_than_queues_are_launched_side_by_side(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The host comes back from the launch of one GPU's graph only when the other's is launched, for
    which it waits."""
    gpus = two_gpus()
    executable = bound(sums(gpus, 3, 16), gpus, 16).executable
    both = threading.Barrier(len(gpus), timeout=20)
    for part in executable.gpus:
        part.graph = CapturedGraph([lambda: None] * 2000, torch.device("cuda"))
        captured: Any = SimpleNamespace(replay=both.wait)
        ended: Any = SimpleNamespace(synchronize=lambda: None, query=lambda: True)
        part.graph._graph, part._ended = captured, ended
    stream = SimpleNamespace(record_event=lambda event: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    executable.run()
