"""A program bound to GPUs: a graph of launches on each, beside the CPU's part in its ring."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from pykernels.errors import PykernelsError
from pykernels.gpu.common.precompile import compiled_together

from ...planning.compile import Compiled
from ...planning.placement import CPU
from ...program import Program
from ...program.node import Node
from ...program.ops import OPS
from ...program.weights import WeightStore
from ...workers.pool import WorkerPool
from ...workers.worker_pool import InFlight
from ..cpu.step import CpuExecutable
from ..link import Launching, Link
from . import handshake
from .binders import BINDERS
from .binders.dense import Launch
from .graph import CapturedGraph, copy_stream, in_turn
from .handshake import ChannelBuffers
from .memory.buffers import Arena, Caches, GpuBuffers, ProgramOutputs

COMPILERS = 16
"""Kernels that are compiled at a time."""


class GpuPart:
    """The part of a program that one GPU runs, as launches in order.

    Args:
        memory: of the part.
        link: to the other parts, if there are any.
        last: what is launched behind it.
        high_priority: see ``CapturedGraph``.

    Raises:
        PykernelsError: an op that this device does not have.
    """

    def __init__(
        self,
        memory: GpuBuffers,
        link: Link | None,
        last: Sequence[Launch] = (),
        high_priority: bool = False,
    ) -> None:
        self.memory, self.device, self._link = memory, memory.device, link
        self._ended = torch.cuda.Event() if self.device.type == "cuda" else None
        with self.current():
            launches = [self._bind(node) for node in memory.program.nodes]
            copies = copy_stream(memory.program)
            self.graph = CapturedGraph([*launches, *last], self.device, copies, high_priority)
        self._thread: Launching | None = None

    def launch(self) -> None:
        """Begins a step."""
        if self._ended is None:  # in the interpreter a thread plays the stream
            self._thread = Launching(self.graph.run, self._link)
            return
        with self.current():
            self.graph.run()
            self._ended.record()

    def compile(self) -> None:
        """Launches what computes once, where launches do not run but compile."""
        with self.current():
            self.graph.first_stream().run()

    def ready(self) -> bool:
        """Whether the step that was begun has ended."""
        if self._thread is not None:
            return self._thread.ended
        return self._ended is None or self._ended.query()

    def result(self) -> None:
        """Waits for the step's end."""
        if self._thread is not None:
            self._thread.end()
        if self._ended is not None:
            self._ended.synchronize()

    def current(self) -> AbstractContextManager[object]:
        """Within it launches go to this GPU."""
        return nullcontext() if self._ended is None else torch.cuda.device(self.device)

    def _bind(self, node: Node) -> Launch:
        if node.op in ("submit", "wait"):
            assert self._link is not None
            end = handshake.submit if node.op == "submit" else handshake.wait
            return end(self.memory, node, self._link)
        binder = BINDERS.get(node.op)
        if binder is None:
            raise PykernelsError(
                f"the cuda device has no {node.op!r}", f"It has {', '.join(BINDERS)}"
            )
        row = OPS[node.op].attrs
        if "activations" in row and (asked := node.attr("activations")) != "bf16":
            raise PykernelsError(
                f"{node.name} has {asked} activations, which the GPU's kernels do not take",
                "Leave them out of the rule, or keep the experts on the CPU (experts cpu)",
            )
        return in_turn(binder(self.memory, node), self.device)


@dataclass(frozen=True)
class GpuMemory:
    """What a program finds on a GPU.

    Attributes:
        inputs: by name, tensors of the step's inputs.
        arena: see ``GpuBuffers``.
        high_priority: see ``CapturedGraph``.
    """

    device: torch.device
    inputs: Mapping[str, torch.Tensor]
    arena: Arena
    high_priority: bool = False


class CudaExecutable:
    """A program that is ready to run, padded to its bucket.

    It is parted by device (``partition``): the nodes of each GPU, and those of device "cpu", which
    run on the workers' ring. All parts are started at once, and meet at flags: a step has no line
    of Python between its nodes.

    Args:
        program: its nodes are on the CPU and on these GPUs.
        weights: the weights of its model.
        gpus: by the name that nodes have as their device; the last one samples.
        host_inputs: CPU tensors of the inputs that nodes of the CPU read.
        sizes: on the CPU, those of the step to come (``Program.step_sizes``).
        channel_buffers: pinned memory, shared with other programs that never run at the same time.
        results: by GPU, where its results go, shared likewise.

    Attributes:
        before: called first in every step, on the host.
        outputs: by name, CPU tensors of all parts' results, valid after ``run``.
        gpus: the parts of the GPUs; ``memory``: of the last one.
        cpu: the CPU's part; None if there is none.

    Raises:
        PykernelsError: an op that a device does not have.
    """

    def __init__(
        self,
        compiled: Compiled,
        weights: WeightStore,
        gpus: Mapping[str, GpuMemory],
        pool: WorkerPool,
        kernel: str,
        host_inputs: Mapping[str, torch.Tensor],
        caches: Caches,
        sizes: torch.Tensor,
        channel_buffers: ChannelBuffers,
        results: Mapping[str, ProgramOutputs],
    ) -> None:
        program, parts = compiled.program, compiled.parts
        self.program, self._pool = program, pool
        self.outputs: dict[str, torch.Tensor] = {}
        self.before: Launch = lambda: None
        self._link = handshake.link(parts, channel_buffers)
        self.cpu: CpuExecutable | None = None
        if CPU in parts:
            own_caches = {name: caches[name] for name in parts[CPU].buffers if name in caches}
            self.cpu = CpuExecutable(
                parts[CPU], weights, pool, host_inputs, own_caches, kernel, sizes, link=self._link
            )
            self.outputs |= self.cpu.outputs
        self.gpus = list[GpuPart]()
        for name, on in gpus.items():
            inputs, found = _sliced(parts[name], on.inputs), results[name]
            own = parts[name], weights, on.device, inputs, caches, _within(program, found.tensors)
            memory = GpuBuffers(*own, on.arena)
            last = [found.receive] if found.host else []
            self.gpus.append(GpuPart(memory, self._link, last, on.high_priority))
            self.outputs |= _within(program, found.host)
        self.memory = self.gpus[-1].memory
        self._in_flight: InFlight | None = None

    def compile(self) -> None:
        """Compiles the GPUs' kernels, several at a time; those of copies when they run first."""
        self.before()
        with compiled_together(min(COMPILERS, os.cpu_count() or 1)) as compiles:
            for part in self.gpus if compiles else ():
                part.compile()

    def run(self) -> None:
        """One step; returns when the results are there.

        Raises:
            TaskError: a task of the CPU failed.
        """
        self.launch()
        self.result()

    def launch(self) -> None:
        """Begins a step."""
        self.before()
        if self._link is not None:
            self._link.clear()
        if self.cpu is not None:
            self._in_flight = self.cpu.launch()
        try:
            for part in self.gpus:
                part.launch()
        except BaseException:
            self._release()
            raise

    def ready(self) -> bool:
        """Whether a step without nodes of the CPU has ended."""
        assert self.cpu is None
        return all(part.ready() for part in self.gpus)

    def result(self) -> None:
        """Ends the step that ``launch`` has begun.

        Raises:
            TaskError: a task of the CPU failed, or was not given its inputs in time.
        """
        flight = self._in_flight
        try:
            if flight is not None:
                self._pool.wait(flight)
                if flight.error is not None or not flight.done:
                    self._end()  # a pool that has failed or ended answers no more
            for part in self.gpus:  # in the order in which they wait for each other
                part.result()
        except BaseException:
            self._end()
            raise
        if flight is not None and flight.error is not None:
            raise flight.error

    def capture(self, pool: Any) -> None:
        """Captures the step; the program has run once before."""
        for part in self.gpus:
            with part.current():
                part.graph.capture(pool)

    def drop_graph(self) -> None:
        """From now on the host launches node by node: what the graph saves can be measured."""
        for part in self.gpus:
            part.graph.drop()

    def without_copies(self) -> CapturedGraph:
        """The launches of the only GPU without those that bring experts to it."""
        [part] = self.gpus
        return part.graph.first_stream()

    def _end(self) -> None:
        """Ends all waiting."""
        if self._link is not None:
            self._link.release()

    def _release(self) -> None:
        """Ends the parts of a step of which another part did not begin."""
        self._end()
        if self._in_flight is not None:
            self._pool.wait(self._in_flight)


def _within(program: Program, results: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The results, as long as the program's bucket."""
    return {name: tensor[: program.shape(name)[0]] for name, tensor in results.items()}


def _sliced(program: Program, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What crosses to a program before a step, as long as its bucket."""
    return {
        name: inputs[name][: program.shape(name)[0]] for name in program.buffers if name in inputs
    }
