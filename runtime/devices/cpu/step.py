"""The ``cpu`` device: a program bound to memory, its nodes as jobs of the workers' ring.

A step is then one call: no line of Python runs between its nodes. Buffers share memory where their
lives do not overlap. What follows a norm reads *rows* in the form of its weight format, so a norm's
output exists in those forms only (``pykernels.cpu.norm``); an input of a linear that is no norm's
output is converted first.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...program import Program
from ...workers.job import Jobs
from ...workers.pool import WorkerPool
from . import attention_ops, dense_ops, expert_ops
from .context import Binder, Context
from .sampling import SamplingBlock

BINDERS: dict[str, Binder] = {
    "embed": dense_ops.embed,
    "rms_norm": dense_ops.rms_norm,
    "linear": dense_ops.linear,
    "heads": dense_ops.heads,
    "rope_table": attention_ops.rope_table,
    "mla_write": attention_ops.mla_write,
    "gqa_write": attention_ops.gqa_write,
    "attention": attention_ops.attention,
    "attention_expanded": attention_ops.attention_expanded,
    "router": expert_ops.router,
    "split_routing": expert_ops.split_routing,
    "moe_ffn": expert_ops.moe_ffn,
    "sample": dense_ops.sample,
}
"""The ops of this device."""


class CpuStep:
    """A program that is ready to run on a pool.

    Args:
        program: with ops of ``BINDERS`` only.
        inputs: by name, int64 tensors of the program's input buffers, in their largest shape.
        caches: by name, tensors of the "cache" buffers.
        kernel: a backend of ``pykernels.registry``, or "auto".
        sizes: int64 [3]; None for its own.
        parameters: how rows are sampled; None: greedily.

    Attributes:
        sizes: T, S and R of the step to come; set it before ``run``.
        outputs: by name, tensors of the "output" buffers.

    Raises:
        PykernelsError: an op that this device does not have, or a kernel that cannot run here.
    """

    def __init__(
        self,
        program: Program,
        pool: WorkerPool,
        inputs: Mapping[str, torch.Tensor],
        caches: Mapping[str, torch.Tensor],
        kernel: str = "auto",
        sizes: torch.Tensor | None = None,
        parameters: SamplingBlock | None = None,
    ) -> None:
        self.program, self.pool = program, pool
        self.sizes = torch.zeros(3, dtype=torch.int64, device="cpu") if sizes is None else sizes
        parameters = parameters or SamplingBlock(program.sizes["R"])
        self._context = Context(program, pool, inputs, caches, kernel, self.sizes, parameters)
        jobs = self._context.bind(BINDERS)
        jobs[0].after = 0  # the step before is complete
        self.jobs = Jobs(jobs)
        self.outputs = self._context.outputs

    def run(self) -> None:
        """One step; the first of many tokens compiles what only such steps need.

        Raises:
            TaskError: a task failed.
        """
        if self._context.uncompiled:
            self._compile(int(self.sizes[0]))
        self.pool.run(self.jobs)

    def _compile(self, tokens: int) -> None:
        context = self._context
        for later in context.uncompiled:
            if later.tokens <= tokens:
                later.prepare()
        context.uncompiled = [later for later in context.uncompiled if tokens < later.tokens]
