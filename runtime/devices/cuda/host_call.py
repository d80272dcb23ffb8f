"""A node that the CPU runs inside a step of the GPU: inputs cross the link, then outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from ...node import Node
from ...program import Program
from ...workers.pool import WorkerPool
from ..cpu.step import CpuExecutable
from .memory import Memory


class HostCall:
    """One node as a program of its own on the workers' ring.

    ``send`` and ``receive`` are launches on the GPU's stream; ``run`` is called when what ``send``
    copies has arrived.

    Args:
        node: of device "cpu"; it reads buffers that the GPU writes, or inputs of the step.
        inputs: by buffer, CPU tensors that need no copy (parameters of sampling).
    """

    def __init__(
        self,
        program: Program,
        node: Node,
        memory: Memory,
        pool: WorkerPool,
        kernel: str,
        sizes: torch.Tensor,
        inputs: Mapping[str, torch.Tensor],
    ) -> None:
        self.node, self._memory = node, memory
        buffers = {name: replace(program.buffers[name], kind="input") for name in node.reads}
        buffers |= {name: replace(program.buffers[name], kind="output") for name in node.writes}
        inner = Program(
            node.name, (replace(node, device="cpu"),), buffers, program.sizes, program.weights
        ).check()
        pinned = memory.device.type == "cuda"
        self._staged = {
            name: torch.zeros(
                program.shape(name),
                dtype=buffers[name].dtype,
                device="cpu",
                pin_memory=pinned,
            )
            for name in dict.fromkeys(node.reads)
            if name not in inputs
        }
        own = {name: tensor for name, tensor in inputs.items() if name in buffers}
        self.executable = CpuExecutable(
            inner, memory.weights, pool, {**own, **self._staged}, {}, kernel, sizes
        )
        # What the executable writes is copied to pinned memory of torch's own: registering memory
        # that someone else frees would leave a mapping of pages that are gone.
        self._results = {
            name: (
                self.executable.outputs[name],
                torch.zeros(
                    program.shape(name),
                    dtype=buffers[name].dtype,
                    device="cpu",
                    pin_memory=pinned,
                ),
            )
            for name in node.writes
            if program.buffers[name].kind == "scratch"
        }
        self._sizes = sizes

    def send(self) -> None:
        """Copies what the node reads to pinned memory."""
        for name, staged in self._staged.items():
            staged.copy_(self._memory.tensor(name).to(staged.dtype), non_blocking=True)

    def run(self) -> None:
        """Runs the node on the CPU.

        Raises:
            TaskError: a task failed.
        """
        self.executable.run()
        T = int(self._sizes[0])
        for result, pinned in self._results.values():
            pinned[:T] = result[:T]

    def receive(self) -> None:
        """Copies what the node wrote to the GPU."""
        for name, (_, pinned) in self._results.items():
            target = self._memory.tensor(name)
            arrived = pinned.to(self._memory.device, non_blocking=True)
            target.copy_(arrived.view(target.shape))
