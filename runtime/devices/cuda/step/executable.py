"""A program bound to GPUs: a graph of launches on each, beside the CPU's part in its ring."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from pykernels.errors import PykernelsError
from pykernels.gpu.common.precompile import compiled_together

from ....planning.compile import Compiled
from ....planning.placement import CPU
from ....program import Program
from ....program.node import Node
from ....program.ops import OPS
from ....program.weights import WeightStore
from ....runner.batch import DeviceLost
from ....workers.pool import WorkerPool
from ....workers.worker_pool import InFlight
from ...cpu.step import CpuExecutable
from ...launching import Launching
from ..binders import BINDERS
from ..binders.dense import Launch
from ..memory.buffers import Arena, Caches, GpuBuffers, ProgramOutputs
from . import handshake
from .channels import ChannelBuffers, link
from .gate import Gate
from .gpu_link import GpuLink
from .graph import CapturedGraph, copy_stream, in_turn
from .watch import LIMIT_S, WATCH

COMPILERS = 16
"""Kernels that are compiled at a time."""


class GpuPart:
    """The part of a program that one GPU runs, as launches in order.

    Args:
        memory: of the part.
        link: to the other parts, if there are any.
        last: what is launched behind it.
        high_priority: see ``CapturedGraph``.
        gate: what its layers wait for; None: nothing.

    Raises:
        PykernelsError: an op that this device does not have.
    """

    def __init__(
        self,
        memory: GpuBuffers,
        link: GpuLink | None,
        last: Sequence[Launch] = (),
        high_priority: bool = False,
        gate: Gate | None = None,
    ) -> None:
        self.memory, self.device, self._link = memory, memory.device, link
        self._ended = torch.cuda.Event() if self.device.type == "cuda" else None
        with self.current():
            launches = [self._bind(node) for node in memory.program.nodes]
            if gate is not None:
                launches = gate.before_layers(launches, memory.program, self.device)
            copies = copy_stream(memory.program)
            self.graph = CapturedGraph([*launches, *last], self.device, copies, high_priority)
        self._thread: Launching | None = None

    def launch(self, apart: bool = False) -> None:
        """Begins a step.

        Args:
            apart: in a thread, where the host might wait for the GPU.
        """
        if self._ended is None:  # in the interpreter a thread plays the stream
            self._thread = Launching(self.graph.run, self._link)
        elif apart and not self.graph.fits_queues:
            stream = torch.cuda.current_stream(self.device)
            self._thread = Launching(partial(self._launch, stream, True), self._link)
        else:
            self._launch(torch.cuda.current_stream(self.device))

    def _launch(self, stream: torch.cuda.Stream, paced: bool = False) -> None:
        with torch.cuda.stream(stream):
            self.graph.run(paced)
            stream.record_event(self._ended)

    def compile(self) -> None:
        """Launches what computes once, where launches do not run but compile."""
        with self.current():
            self.graph.first_stream().run()

    def ready(self) -> bool:
        """Whether the step that was begun has ended."""
        if self._thread is not None and not self._thread.ended:
            return False
        return self._ended is None or self._ended.query()

    def result(self) -> None:
        """Waits for the step's end.

        Raises:
            DeviceLost: the GPU failed.
        """
        thread, self._thread = self._thread, None
        try:
            if thread is not None:
                thread.end()
            if self._ended is not None:
                self._ended.synchronize()
        except torch.AcceleratorError as error:  # no later call on this GPU works either
            raise DeviceLost(
                f"{self.device} failed: {str(error).splitlines()[0]}", "Load the model again"
            ) from error

    def current(self) -> AbstractContextManager[object]:
        """Within it launches go to this GPU."""
        return nullcontext() if self._ended is None else torch.cuda.device(self.device)

    def _bind(self, node: Node) -> Launch:
        if node.op in handshake.ENDS:
            assert self._link is not None
            end = getattr(handshake, node.op)
            launch: Launch = end(self.memory, node, self._link)
            return launch
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
        high_priority: see ``CapturedGraph``; ``gate``: see ``GpuPart``.
    """

    device: torch.device
    inputs: Mapping[str, torch.Tensor]
    arena: Arena
    high_priority: bool = False
    gate: Gate | None = None


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
        channel_buffers: memory shared with other programs that never run at the same time.
        results: by GPU, where its results go, shared likewise.

    Attributes:
        before: called first in every step, on the host.
        outputs: by name, CPU tensors of all parts' results, valid after ``run``.
        gpus: the parts of the GPUs; ``memory``: of the last one.
        cpu: the CPU's part; None if there is none.
        link: where the parts meet; None where they do not.

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
        self.link = link(parts, channel_buffers)
        self.cpu: CpuExecutable | None = None
        if CPU in parts:
            own_caches = {name: caches[name] for name in parts[CPU].buffers if name in caches}
            self.cpu = CpuExecutable(
                parts[CPU], weights, pool, host_inputs, own_caches, kernel, sizes, link=self.link
            )
            self.outputs |= self.cpu.outputs
        self._gates = [on.gate for on in gpus.values() if on.gate is not None]
        self.gpus = list[GpuPart]()
        for name, on in gpus.items():
            inputs, found = _sliced(parts[name], on.inputs), results[name]
            own = parts[name], weights, on.device, inputs, caches, _within(program, found.tensors)
            memory = GpuBuffers(*own, on.arena)
            last = [found.receive] if found.host else []
            self.gpus.append(GpuPart(memory, self.link, last, on.high_priority, on.gate))
            self.outputs |= _within(program, found.host)
        self.memory = self.gpus[-1].memory
        self._in_flight: InFlight | None = None
        self._limit_s = LIMIT_S if self.cpu is None else math.inf  # the workers are watched apart
        self._watched = ExitStack()  # from a step's launch to its result

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

    def run_first(self) -> None:
        """One step of any numbers, in which GPUs do not wait for each other: CUDA loads a kernel
        when all that was launched before has run."""
        link = self.link if self.cpu is None else None  # the CPU counts up what is released
        with nullcontext() if link is None else link.released():
            self.run()

    def launch(self) -> None:
        """Begins a step."""
        self.before()
        if self.link is not None:
            self.link.clear()
        if self.cpu is not None:
            self._in_flight = self.cpu.launch()
        try:
            # GPUs that wait for each other: the queue of one may be full before another has begun,
            # of a graph, too. Behind a full queue a host would wait whose other steps are to go on.
            several = len(self.gpus) > 1
            apart = several or bool(self._gates)
            if self.link is not None:
                if self.link.clears:  # else nobody waits
                    over = WATCH.over(self.gpus, self.link, self._limit_s, self._parked)
                    self._watched.enter_context(over)
                captured = all(part.graph.is_captured for part in self.gpus)
                self.link.in_order = captured or not several
            for part in self.gpus:
                part.launch(apart)
        except BaseException:
            self._release()
            raise

    def ready(self) -> bool:
        """Whether a step without nodes of the CPU has ended."""
        assert self.cpu is None
        ended = [part.ready() for part in self.gpus]  # asks all: one may wait for one that failed
        return all(ended)

    def result(self) -> None:
        """Ends the step that ``launch`` has begun.

        Raises:
            TaskError: a task of the CPU failed, or was not given its inputs in time.
            DeviceLost: a GPU failed, or waited in vain for another one.
        """
        flight = self._in_flight
        try:
            with self._watched:
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
        if self.link is not None:
            self.link.check()

    def capture(self, pool: Any) -> None:
        """Captures the step; the program has run once before."""
        if self.link is not None:
            self.link.in_order = True
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
        """Ends all waiting, and what waited: nothing of this step runs beside the next one."""
        if self.link is not None:
            self.link.release()
        for part in self.gpus:
            with suppress(Exception):  # one is being raised already
                part.result()

    def _parked(self) -> bool:
        return any(gate.closed for gate in self._gates)

    def _release(self) -> None:
        """Ends the parts of a step of which another part did not begin."""
        with self._watched:
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
