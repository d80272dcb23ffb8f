"""Two GPUs that send each other their part of a sum in every layer; in Triton's interpreter two
threads play them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from runtime.devices.cuda.memory.buffers import Arena, StepOutputs
from runtime.devices.cuda.step.channels import ChannelBuffers
from runtime.devices.cuda.step.executable import CudaExecutable, GpuMemory
from runtime.devices.cuda.step.peers import Peers
from runtime.devices.gpus import Gpus, gpus_of
from runtime.planning.compile import Compiled
from runtime.program import Node, Program
from runtime.program.node import Buffer, repeated

BF16 = torch.bfloat16


def two_gpus() -> Gpus:
    """Skips a test where there is only one."""
    if not torch.cuda.is_available():
        return gpus_of("cpu,cpu")
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    return gpus_of("cuda:0,cuda:1")


def sums(gpus: Gpus, layers: int, H: int) -> Program:
    """Each GPU has an input [1, H] (``x0``, ``x1``) as its part of the first sum, which both add
    up; a part of the next one is the sum itself. So ``out0`` and ``out1`` are 2 ** (layers - 1) as
    much as the sum of the inputs."""
    nodes: list[Node] = []
    buffers = {name: Buffer(name, ("T", H), BF16, "input") for name in ("x0", "x1")}
    before = "x0", "x1"
    for layer in range(layers):
        ends = [f"{layer}.sum0", f"{layer}.sum1"] if layer + 1 < layers else ["out0", "out1"]
        parts = [f"{layer}.part0", f"{layer}.part1"]
        for rank, gpu in enumerate(gpus):
            one = {"x0": before[rank]}, {"out": parts[rank]}
            nodes.append(Node("add", *one, device=gpu, name=parts[rank], layer=layer))
        for rank, gpu in enumerate(gpus):
            both = repeated("x", parts), {"out": ends[rank]}
            nodes.append(Node("add", *both, device=gpu, name=ends[rank], layer=layer))
        kind = "scratch" if layer + 1 < layers else "output"
        buffers |= {name: Buffer(name, ("T", H)) for name in parts}
        buffers |= {name: Buffer(name, ("T", H), kind=kind) for name in ends}
        before = ends[0], ends[1]
    return Program("sums", tuple(nodes), buffers, {"T": 1, "S": 1, "R": 1}).check()


@dataclass(frozen=True)
class Bound:
    """A program of ``sums``, bound to its GPUs.

    Attributes:
        inputs: [1, H] of each GPU.
    """

    executable: CudaExecutable
    inputs: list[torch.Tensor]

    def assert_adds(self, first: int, last: int, layers: int) -> None:
        """A step with these two numbers in all columns, small enough to be exact in bfloat16."""
        for x, value in zip(self.inputs, (first, last), strict=True):
            x.fill_(value)
        for x in self.inputs:
            if x.is_cuda:
                torch.cuda.synchronize(x.device)
        self.executable.run()
        expected = (first + last) * 2 ** (layers - 1)
        for name in ("out0", "out1"):
            found = self.executable.outputs[name]
            assert (found == expected).all(), (name, first, last, found)


def bound(program: Program, gpus: Gpus, H: int) -> Bound:
    """The program on these GPUs, not captured."""
    inputs = [torch.zeros(1, H, dtype=BF16, device=device) for device in gpus.values()]
    memory: dict[str, GpuMemory] = {}
    results: dict[str, Any] = {}
    for rank, (name, device) in enumerate(gpus.items()):
        memory[name] = GpuMemory(device, {f"x{rank}": inputs[rank]}, Arena(device))
        results[name] = StepOutputs({f"out{rank}": ((1, H), torch.float32)}, device).of({})
    channels = ChannelBuffers(gpus, Peers.of(gpus))
    pool: Any = None  # nothing is on the CPU
    sizes = torch.ones(3, dtype=torch.int64)
    own = pool, "generic", {}, {}, sizes, channels, results
    return Bound(CudaExecutable(Compiled.of(program), pool, memory, *own), inputs)
