"""The ``ref`` device: a program's nodes as operations of a stream, in float32.

Where a program has nodes on the ``cpu`` device (``passes.offload``) it is partitioned, and a second
stream runs those with the real kernels. The two meet at flags only, as a GPU and a CPU do: this
stream stores what it submits into the memory of the other part, and loads from there what it waits
for. Buffers lie where the memory plan has them, over each other where their lives allow it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from time import perf_counter_ns

import torch

from pykernels.errors import PykernelsError

from ...analysis import dependencies
from ...partition import partition
from ...program import Node, Program
from ...workers.pool import WorkerPool
from .experts import NodeCall
from .memory import Memory
from .ops import OPS
from .stream import Flags, Stream

HERE, CPU = "ref", "cpu"


class RefExecutable:
    """A program that is ready to run.

    Args:
        inputs: by name, tensors of the program's input buffers, in their largest shape.
        caches: by name, tensors of the "cache" buffers.
        pool: runs the nodes on the ``cpu`` device; needed only for these.
        kernel: their backend.
        sizes: int64 [3]; None for its own.
        reuse: whether buffers share memory as planned; False: each has its own.

    Attributes:
        sizes: T, S and R of the step to come; set it before ``run``.
        inputs: as given.
        outputs: by name, tensors of the "output" buffers.
        memory: of this device's part.
        calls: by node name, those of the ``cpu`` device.
        times: of the last step, (stream, node, begin, end) in ns.

    Raises:
        PykernelsError: an op or a device that this one does not have, an input that is not given,
            or no pool where one is needed.
    """

    def __init__(
        self,
        program: Program,
        inputs: Mapping[str, torch.Tensor],
        caches: Mapping[str, torch.Tensor],
        pool: WorkerPool | None = None,
        kernel: str = "auto",
        sizes: torch.Tensor | None = None,
        reuse: bool = True,
    ) -> None:
        self.program = program
        self.sizes = torch.zeros(3, dtype=torch.int64, device="cpu") if sizes is None else sizes
        self.inputs = dict(inputs)
        self.times: list[tuple[str, str, int, int]] = []
        self._parts = partition(program)
        self._refuse(pool)
        self._memories = {
            device: Memory(
                part,
                self.sizes,
                {**inputs, **caches},
                dependencies(part, in_order=device == HERE) if reuse else None,
            )
            for device, part in self._parts.items()
        }
        self.memory = self._memories[HERE]
        self.outputs = {n: x for m in self._memories.values() for n, x in m.outputs.items()}
        self.calls: dict[str, NodeCall] = {}
        if CPU in self._parts:
            assert pool is not None
            for node in self._parts[CPU].nodes:
                if node.op not in ("submit", "wait"):
                    self.calls[node.name] = NodeCall(node, self._memories[CPU], pool, kernel)
        channels = [n for p in self._parts.values() for n in p.nodes if n.op == "submit"]
        self._flags = Flags(len(channels))
        self._stream = Stream("ref")
        self._cpu = Stream("ref-cpu") if self.calls else None
        self._count = 0

    def run(self) -> None:
        """One step.

        Raises:
            what an op raised.
        """
        self.launch()
        self.result()

    def launch(self) -> None:
        """Begins a step."""
        self._count += 1
        self.times.clear()
        self._flags.mend()
        if self._cpu is not None:
            for node in self._parts[CPU].nodes:
                self._serve(self._cpu, node)
        for node in self._parts[HERE].nodes:
            self._launch(node)

    def result(self) -> None:
        """Ends the step that ``launch`` has begun.

        Raises:
            what an op raised.
        """
        try:
            self._stream.synchronize()
        except BaseException as error:
            self._flags.fail(error)  # the other stream may wait for what comes no more
            self._drain()
            raise
        if self._cpu is not None:
            self._cpu.synchronize()

    def close(self) -> None:
        """Ends the streams."""
        for stream in (self._stream, self._cpu):
            if stream is not None:
                stream.close()

    def __del__(self) -> None:
        if hasattr(self, "_count"):
            self.close()

    def execute(self, node: Node) -> None:
        """Runs one node of this device, in its stream."""
        OPS[node.op](self.memory, node)

    def submit(self, node: Node) -> None:
        """Stores buffers into the other part's memory."""
        for name in node.reads:
            self._memories[CPU].write(name, self.memory.read(name))

    def _load(self, node: Node) -> None:
        """Loads buffers from the other part's memory."""
        for name in node.writes:
            self.memory.write(name, self._memories[CPU].read(name))

    def _launch(self, node: Node) -> None:
        stream, flags = self._stream, self._flags
        if node.op == "submit":
            stream.launch(self._timed(HERE, node.name, partial(self.submit, node)))
            stream.write_value(flags, node.attr("channel"), self._count)
        elif node.op == "wait":
            stream.wait_value(flags, node.attr("channel"), self._count)
            stream.launch(self._timed(HERE, node.name, partial(self._load, node)))
        else:
            stream.launch(self._timed(HERE, node.name, partial(self.execute, node)))

    def _serve(self, stream: Stream, node: Node) -> None:
        """Puts a node of the ``cpu`` device on its stream."""
        if node.op == "submit":
            stream.write_value(self._flags, node.attr("channel"), self._count)
            return
        if node.op == "wait":
            stream.wait_value(self._flags, node.attr("channel"), self._count)
            return
        call = self.calls[node.name]

        def run() -> None:
            try:
                self._timed(CPU, call.name, call.run)()
            except BaseException as error:
                self._flags.fail(error)
                raise

        stream.launch(run)

    def _timed(self, stream: str, name: str, operation: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            begin = perf_counter_ns()
            operation()
            self.times.append((stream, name, begin, perf_counter_ns()))

        return run

    def _refuse(self, pool: WorkerPool | None) -> None:
        for device, part in self._parts.items():
            if device not in (HERE, CPU):
                raise PykernelsError(
                    f"{part.nodes[0].name} is on {device!r}", f"Use {HERE!r} and {CPU!r} here"
                )
            for node in part.nodes:
                if device == HERE and node.op not in (*OPS, "submit", "wait"):
                    raise PykernelsError(
                        f"the ref device has no {node.op!r}", f"It has {', '.join(OPS)}"
                    )
        if HERE not in self._parts:
            raise PykernelsError(f"{self.program.name!r} has no node here", "Run it on the cpu")
        if CPU in self._parts and pool is None:
            raise PykernelsError(
                f"{self._parts[CPU].nodes[-1].name} needs the cpu device", "Give it a WorkerPool"
            )

    def _drain(self) -> None:
        if self._cpu is not None:
            try:
                self._cpu.synchronize()
            except Exception:  # the first error is the one to report
                return
