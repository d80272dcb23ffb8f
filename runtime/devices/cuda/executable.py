"""A program bound to a GPU: one graph of launches, beside the CPU's half on the workers' ring."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from pykernels.errors import PykernelsError

from ...node import Node
from ...ops import OPS
from ...partition import partition
from ...program import Program
from ...weights import WeightStore
from ...workers.pool import WorkerPool
from ...workers.worker_pool import InFlight
from ..cpu.step import CpuExecutable
from ..link import Launching, Link
from . import handshake
from .handshake import PinnedSlots
from .launches import attention, dense, experts, latents, sampling, streamed
from .launches.dense import Launch
from .memory import Arena, Caches, Memory
from .outputs import ProgramOutputs
from .segment import Segment, beside
from .sequences import Sequences

BINDERS: Mapping[str, Callable[[Memory, Node], Launch]] = {
    "embed": dense.embed,
    "rms_norm": dense.rms_norm,
    "linear": dense.linear,
    "per_head_linear": latents.per_head,
    "rope_table": attention.rope_table,
    "mla_rope_cache_write": attention.mla_rope_cache_write,
    "gqa_rope_cache_write": attention.gqa_rope_cache_write,
    "attention": attention.attention,
    "attention_expanded": latents.attention_expanded,
    "router": experts.router,
    "split_routing": experts.split_routing,
    "place_routing": experts.place_routing,
    "load_experts": streamed.load_experts,
    "unpack_experts": streamed.unpack_experts,
    "moe_ffn": experts.moe_ffn,
    "join_rows": dense.join_rows,
    "sample_requests": sampling.sample_requests,
}
"""The ops of this device."""


class CudaExecutable:
    """A program that is ready to run, padded to its bucket.

    Nodes of device "cpu" are a program of their own on the workers' ring (``partition``). Both are
    started at once, and meet at flags: a step has no line of Python between its nodes.

    Args:
        program: its nodes are on the CPU and on this GPU.
        weights: of its model.
        inputs: GPU tensors of the step's inputs; ``host_inputs``: CPU tensors of those that nodes
            of the CPU read.
        sequences, arena: see ``Memory``.
        sizes: on the CPU, those of the step to come (``Program.step_sizes``).
        slots: pinned memory, shared with other programs that never run at the same time.
        sampled: where what is sampled goes, shared likewise, and other results.

    Attributes:
        before: called first in every step, on the host.
        outputs: by name, CPU tensors of what is sampled, valid after ``run``.
        cpu: the CPU's half; None if there is none.

    Raises:
        PykernelsError: an op that this device does not have.
    """

    def __init__(
        self,
        program: Program,
        weights: WeightStore,
        device: torch.device,
        pool: WorkerPool,
        kernel: str,
        inputs: Mapping[str, torch.Tensor],
        host_inputs: Mapping[str, torch.Tensor],
        caches: Caches,
        sequences: Sequences,
        arena: Arena,
        sizes: torch.Tensor,
        slots: PinnedSlots,
        sampled: ProgramOutputs,
    ) -> None:
        self.program, self.device, self._pool = program, device, pool
        halves = partition(program)
        cpu = halves.pop("cpu", None)
        (gpu,) = halves.values()
        sliced = {
            name: inputs[name][: program.shape(name)[0]]
            for name, buffer in gpu.buffers.items()
            if buffer.kind == "input" and name in inputs
        }
        on_gpu, self.outputs = (
            {name: tensor[: program.shape(name)[0]] for name, tensor in tensors.items()}
            for tensors in (sampled.tensors, sampled.host)
        )
        self.memory = Memory(gpu, weights, device, sliced, caches, on_gpu, sequences, arena)
        self.before: Launch = lambda: None
        self._link: Link | None = None
        self.cpu: CpuExecutable | None = None
        if cpu is not None:
            self._link = handshake.link(gpu, cpu, slots)
            self.cpu = CpuExecutable(
                cpu, weights, pool, host_inputs, {}, kernel, sizes, link=self._link
            )
        launches = [*map(self._bind, gpu.nodes), sampled.receive]
        self._graph = Segment(launches, device, beside(gpu))
        self._ended = torch.cuda.Event() if device.type == "cuda" else None
        self._in_flight: InFlight | None = None
        self._thread: Launching | None = None

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
        if self.cpu is not None:
            assert self._link is not None
            self._link.clear()
            self._in_flight = self.cpu.launch()
        try:
            self._start()
        except BaseException:
            self._release()
            raise

    def result(self) -> None:
        """Ends the step that ``launch`` has begun.

        Raises:
            TaskError: a task of the CPU failed, or was not given its inputs in time.
        """
        try:
            if self._in_flight is not None:
                self._pool.wait(self._in_flight)
        finally:
            if self._link is not None:
                self._link.release()  # of a pool that has ended, the GPU waits no more
        if self._thread is not None:
            self._thread.end()
        if self._ended is not None:
            self._ended.synchronize()
        if self._in_flight is not None and self._in_flight.error is not None:
            raise self._in_flight.error

    def capture(self, pool: Any) -> None:
        """Captures the step; the program has run once before."""
        self._graph.capture(pool)

    def drop_graph(self) -> None:
        """From now on the host launches node by node: what the graph saves can be measured."""
        self._graph.drop()

    def without_copies(self) -> Segment:
        """The GPU's launches without those that bring experts to it."""
        return self._graph.first_stream()

    def _start(self) -> None:
        if self._ended is None:  # in the interpreter a thread plays the stream
            self._thread = Launching(self._graph.run, self._link)
            return
        with torch.cuda.device(self.device):
            self._graph.run()
            self._ended.record()

    def _release(self) -> None:
        """Ends the CPU's half of a step whose other half did not begin."""
        if self._link is not None and self._in_flight is not None:
            self._link.release()
            self._pool.wait(self._in_flight)

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
        return binder(self.memory, node)
