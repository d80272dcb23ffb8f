"""The ``ref`` device: a program's nodes in float32, one after the other.

Where a program has nodes on the ``cpu`` device (``passes.offload``) it is partitioned, and the
workers run those with the real kernels, as with a GPU: a thread plays the GPU's stream, and the
two meet at flags only. Buffers lie where the memory plan has them, over each other where their
lives allow it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import monotonic_ns

import torch

from pykernels.errors import PykernelsError

from ...planning.compile import Compiled
from ...program import Node
from ...program.analysis import on_streams
from ...program.weights import WeightStore
from ...runner import active
from ...workers.pool import TaskError, WorkerPool
from ..collectives import Communicator
from ..cpu.step import CpuExecutable
from ..launching import Launching
from ..link import Link, carried
from .memory import RefBuffers
from .ops import OPS

REF, CPU = "ref", "cpu"


class RefExecutable:
    """A program that is ready to run.

    Args:
        weights: the weights of the program's model.
        inputs: by name, tensors of the program's input buffers, in their largest shape.
        caches: by name, tensors of the "cache" buffers.
        pool: runs the nodes on the ``cpu`` device; needed only for these.
        kernel: their backend.
        sizes: as ``Program.step_sizes``; None for its own.
        reuse: whether buffers share memory as planned; False: each has its own.
        ranks: where the program meets those of other ranks; needed if it has collectives.

    Attributes:
        sizes: T, S and R of the step to come; set it before ``run``.
        inputs: as given.
        outputs: by name, tensors of the "output" buffers.
        ref: this device's part, whose nodes run in their order; ``memory``: of it.
        cpu: the other part; None if there is none. ``link``: between the two.
        before: called first in every step, in the thread that launches it.

    Raises:
        PykernelsError: an op or a device that this one does not have, an input that is not given,
            or no pool where one is needed.
    """

    def __init__(
        self,
        compiled: Compiled,
        weights: WeightStore,
        inputs: Mapping[str, torch.Tensor],
        caches: Mapping[str, torch.Tensor],
        pool: WorkerPool | None = None,
        kernel: str = "auto",
        sizes: torch.Tensor | None = None,
        reuse: bool = True,
        ranks: Communicator | None = None,
    ) -> None:
        self.program, self._ranks = compiled.program, ranks
        self.sizes = self.program.step_sizes() if sizes is None else sizes
        self.inputs = dict(inputs)
        self._parts = compiled.parts
        self._refuse(pool)
        self.ref = ref = self._parts[REF]
        order = on_streams(ref) if reuse else None
        self.memory = RefBuffers(ref, weights, self.sizes, {**inputs, **caches}, order, ranks)
        self.outputs = dict(self.memory.outputs)
        self.cpu: CpuExecutable | None = None
        self.link: Link | None = None
        self.before: Callable[[], None] = lambda: None
        self._stream: Launching
        if CPU in self._parts:
            assert pool is not None
            other = self._parts[CPU]
            buffers = {
                name: torch.zeros(other.shape(name), dtype=other.buffers[name].dtype, device="cpu")
                for name in carried(other)
            }
            self.link = Link(self._parts, buffers, pinned=False)
            self.cpu = CpuExecutable(
                other, weights, pool, inputs, {}, kernel, self.sizes, link=self.link
            )
            self.outputs |= self.cpu.outputs

    def run(self) -> None:
        """One step.

        Raises:
            TaskError: a task of the other part failed; or what an op raised.
        """
        self.launch()
        self.result()

    def launch(self) -> None:
        """Begins a step: this device's part in a thread of its own."""
        self.before()
        if self.cpu is not None and self.link is not None:
            self.link.clear()
            self.cpu.launch()
        self._stream = Launching(self._run, self.link)

    def result(self) -> None:
        """Ends the step that ``launch`` has begun.

        Raises:
            TaskError: a task of the other part failed; or what an op raised.
        """
        error = None
        if self.cpu is not None and self.link is not None:
            try:
                self.cpu.result()
            except TaskError as failure:
                error = failure
                self._give_up(failure)
            finally:
                self.link.release()  # of a pool that has ended, the stream waits no more
        self._stream.end()
        if error is not None:
            raise error

    def execute(self, node: Node) -> None:
        """Runs one node of this device."""
        if node.op == "submit":
            self.submit(node)
        elif node.op == "wait":
            assert self.link is not None
            self.link.wait(node)
            for name in node.writes:
                self.memory.write(name, self.link.buffers[name][: self.memory.length(name)])
        else:
            OPS[node.op](self.memory, node)

    def submit(self, node: Node) -> None:
        """Stores buffers where the other part reads them."""
        assert self.link is not None
        for name in node.reads:
            self.link.buffers[name][: self.memory.length(name)] = self.memory.read(name)
        self.link.set(node)

    def _run(self) -> None:
        try:
            for node in self.ref.nodes:
                begin = monotonic_ns()
                self.execute(node)
                active.node(REF, node.name, begin, monotonic_ns())
        except BaseException as error:
            self._give_up(error)
            raise

    def _give_up(self, error: BaseException) -> None:
        """Tells the other ranks, which would wait for this one."""
        if self._ranks is not None:
            self._ranks.abort(error)

    def _refuse(self, pool: WorkerPool | None) -> None:
        for device, part in self._parts.items():
            if device not in (REF, CPU):
                raise PykernelsError(
                    f"{part.nodes[0].name} is on {device!r}", f"Use {REF!r} and {CPU!r} here"
                )
            for node in part.nodes:
                if device == REF and node.op not in (*OPS, "submit", "wait"):
                    raise PykernelsError(
                        f"the ref device has no {node.op!r}", f"It has {', '.join(OPS)}"
                    )
        if REF not in self._parts:
            raise PykernelsError(f"{self.program.name!r} has no node here", "Run it on the cpu")
        if CPU in self._parts and pool is None:
            raise PykernelsError(
                f"{self._parts[CPU].nodes[-1].name} needs the cpu device", "Give it a WorkerPool"
            )
