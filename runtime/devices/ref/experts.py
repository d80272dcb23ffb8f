"""Nodes that a program has on the ``cpu`` device while the rest is here: real kernels on a ring."""

from __future__ import annotations

from dataclasses import replace

from ...program import Node, Program
from ...workers.pool import WorkerPool
from ..cpu.step import CpuExecutable
from .memory import Memory


class NodeCall:
    """One node of the ``cpu`` device's part, over the memory of that part.

    Args:
        memory: of the part; the node's inputs are read there, and its outputs written.
    """

    def __init__(self, node: Node, memory: Memory, pool: WorkerPool, kernel: str) -> None:
        self.name, self._memory, program = node.name, memory, memory.program
        buffers = {name: replace(program.buffers[name], kind="input") for name in node.reads}
        buffers |= {name: replace(program.buffers[name], kind="output") for name in node.writes}
        alone = Program(node.name, (node,), buffers, program.sizes, program.weights).check()
        inputs = {name: memory.whole(name) for name in node.reads}
        self._step = CpuExecutable(alone, memory.weights, pool, inputs, {}, kernel, memory.sizes)

    def run(self) -> None:
        """Runs the node.

        Raises:
            TaskError: a task failed.
        """
        self._step.run()
        for name, tensor in self._step.outputs.items():
            self._memory.write(name, tensor[: self._memory.length(name)])
