"""Experts that a host program hands to the ``cpu`` device: its kernels, over pinned buffers."""

from __future__ import annotations

from dataclasses import replace

import torch

from ...program import Node, Program
from ...workers.pool import WorkerPool
from ..cpu.step import CpuStep


class ExpertCall:
    """One ``submit`` node: a program of one node on the workers' ring, and what it reads and
    writes, which neither side touches while it is the other's.

    Args:
        node: inputs x [T, H], ids and weights [T, topk]; its weights and attributes are those of
            the ``moe_ffn`` that it stands for.
    """

    def __init__(self, program: Program, node: Node, pool: WorkerPool, kernel: str) -> None:
        self.name = node.name
        x, ids, weights = node.inputs
        buffers = {name: replace(program.buffers[name], kind="input") for name in (x, ids, weights)}
        y = replace(program.buffers[x], name=f"{node.name}.y", kind="output")
        inner = Program(
            node.name,
            (replace(node, op="moe_ffn", outputs=(y.name,), device="cpu"),),
            {**buffers, y.name: y},
            program.sizes,
        ).check()
        self._inputs = {
            name: torch.zeros(program.shape(name), dtype=buffer.dtype, device="cpu")
            for name, buffer in buffers.items()
        }
        self._step = CpuStep(inner, pool, self._inputs, {}, kernel)
        self._y = self._step.outputs[y.name]

    def take(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        """Copies a step's inputs."""
        for pinned, value in zip(self._inputs.values(), (x, ids, weights), strict=True):
            pinned[: len(value)] = value
        self._step.sizes[0] = len(x)

    def run(self) -> None:
        """Runs the experts.

        Raises:
            TaskError: a task failed.
        """
        self._step.run()

    def result(self, T: int) -> torch.Tensor:
        """float32 [T, H], a copy."""
        return self._y[:T].clone()
