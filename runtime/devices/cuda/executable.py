"""A program bound to a GPU: segments of launches, and calls of the CPU between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from pykernels.errors import PykernelsError

from ...node import Node
from ...ops import OPS
from ...program import Program
from ...workers.pool import WorkerPool
from . import attention, dense, experts, sampling
from .dense import Launch
from .host_call import HostCall
from .memory import Caches, Memory
from .outputs import StepOutputs
from .segment import Segment

BINDERS: Mapping[str, Callable[[Memory, Node], Launch]] = {
    "embed": dense.embed,
    "rms_norm": dense.rms_norm,
    "linear": dense.linear,
    "per_head_linear": dense.per_head_linear,
    "rope_table": attention.rope_table,
    "mla_rope_cache_write": attention.mla_rope_cache_write,
    "gqa_rope_cache_write": attention.gqa_rope_cache_write,
    "attention": attention.attention,
    "attention_expanded": attention.attention_expanded,
    "router": experts.router,
    "split_routing": experts.split_routing,
    "moe_ffn": experts.moe_ffn,
    "sample_requests": sampling.sample_requests,
}
"""The ops of this device."""


@dataclass
class _Hop:
    """A call of the CPU: ``before`` ends with its ``send``; ``beside`` needs nothing of it."""

    before: Segment
    beside: Segment
    call: HostCall


class CudaExecutable:
    """A program that is ready to run, padded to its bucket.

    Args:
        program: its nodes of device "cpu" are run by the workers, the others by this GPU.
        inputs: GPU tensors of the step's inputs; ``host_inputs``: CPU tensors of those that nodes
            of the CPU read.
        tokens_table, key_lengths: see ``Memory``; ``prelude``: a launch that fills the former.
        sizes: int64 [3] on the CPU: T, S and R of the step to come.
        sampled: where what is sampled goes.

    Attributes:
        before: called first in every step: it sends the inputs.
        outputs: by name, CPU tensors of what is sampled, valid after ``run``.

    Raises:
        PykernelsError: an op that this device does not have.
    """

    def __init__(
        self,
        program: Program,
        device: torch.device,
        pool: WorkerPool,
        kernel: str,
        inputs: Mapping[str, torch.Tensor],
        host_inputs: Mapping[str, torch.Tensor],
        caches: Caches,
        tokens_table: torch.Tensor,
        key_lengths: torch.Tensor,
        prelude: Launch,
        sizes: torch.Tensor,
        sampled: StepOutputs,
    ) -> None:
        self.program, self.device = program, device
        on_gpu, self.outputs = (
            {name: tensor[: program.shape(name)[0]] for name, tensor in tensors.items()}
            for tensors in (sampled.tensors, sampled.host)
        )
        sliced = {
            name: inputs[name][: program.shape(name)[0]]
            for name, buffer in program.buffers.items()
            if buffer.kind == "input" and name in inputs
        }
        self.memory = Memory(program, device, sliced, caches, on_gpu, tokens_table, key_lengths)
        self._arrived = torch.cuda.Event() if device.type == "cuda" else None
        self.before: Launch = lambda: None
        self._hops: list[_Hop] = []
        launches: list[Launch] = [prelude]
        nodes = list(program.nodes)
        while nodes:
            node = nodes.pop(0)
            if node.device != "cpu":
                launches.append(self._bind(node))
                continue
            call = HostCall(program, node, self.memory, pool, kernel, sizes, host_inputs)
            beside: list[Launch] = []
            results = set(node.writes)
            while nodes and nodes[0].device != "cpu" and not results & set(nodes[0].reads):
                beside.append(self._bind(nodes.pop(0)))
            before = Segment([*launches, call.send], device)
            self._hops.append(_Hop(before, Segment(beside, device), call))
            launches = [call.receive]
        self._last = Segment([*launches, sampled.receive], device)

    def run(self) -> None:
        """One step; returns when the results are there.

        Raises:
            TaskError: a task of the CPU failed.
        """
        with torch.cuda.device(self.device) if self._arrived is not None else nullcontext():
            self._run()

    def _run(self) -> None:
        self.before()
        for hop in self._hops:
            hop.before.run()
            if self._arrived is not None:
                self._arrived.record()
            hop.beside.run()
            if self._arrived is not None:
                self._arrived.synchronize()
            hop.call.run()
        self._last.run()
        if self._arrived is not None:
            self._arrived.record()
            self._arrived.synchronize()

    def capture(self, pool: Any) -> None:
        """Captures every segment; the program has run once before."""
        for hop in self._hops:
            hop.before.capture(pool)
            hop.beside.capture(pool)
        self._last.capture(pool)

    def _bind(self, node: Node) -> Launch:
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
