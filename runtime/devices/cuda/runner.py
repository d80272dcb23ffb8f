"""A model on a GPU, as the engine drives it: its programs as CUDA graphs, experts on the CPU where
they do not fit."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext

import torch

from ...experts.cache import CachePolicy
from ...planning.execution import ExecutionPlan, Phase
from ...planning.placement import CPU
from ...planning.prompt_sizes import HOST_BUCKETS, PromptSizes
from ...planning.residency import Filled
from ...runner.paged_runner import Executable
from ...runner.slots import Slots
from ...workers.pool import WorkerPool
from ..gpus import Gpus
from .binders.sampling import waits_for_masks
from .calibrate import calibrated
from .lane import CudaLane
from .memory.experts import on_gpu
from .resources import CudaResources
from .streamed_runner import StreamedRunner

DECODE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512)
PROMPT_BUCKETS = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072)
"""Buckets of steps with chunks of prompts, besides the largest one: a step computes at most half
as much again as it has tokens for, and experts nothing for padding."""


class CudaRunner(CudaLane):
    """See ``runner.batch.Runner``.

    Args:
        plan: see ``planning.gpu.plan``; an open one to load weights by (``finished``).

    Attributes:
        gpus: by their names in programs.
        device: the last GPU, which samples.
    """

    decode_buckets = DECODE_BUCKETS
    keeps_states = False
    pool: WorkerPool

    def __init__(self, resources: CudaResources, plan: ExecutionPlan) -> None:
        super().__init__(resources, plan)
        self.gpus: Gpus = resources.gpus
        self.pinned = resources.pinned
        self.late_masks = waits_for_masks(self.device)
        self.buckets = HOST_BUCKETS if plan.placement.experts == CPU else PROMPT_BUCKETS

    def finished(self) -> CudaRunner:
        if not self.plan.is_open:
            return self
        return CudaRunner(self._resources, calibrated(self._resources, self.plan))

    def make_slots(self) -> Slots | None:
        if not self.plan.placement.filled(Filled.BETWEEN_STEPS):
            return None
        program, policy = self.compiled().program, self.plan.policy or CachePolicy()
        slots, self._table = on_gpu(program, self.weights, self.device, policy, self.pinned)
        self.caches.update(zip(slots.tables, self._table, strict=True))
        return slots

    def before_slots(self, slots: Slots) -> None:
        if slots.before_step():
            with torch.cuda.device(self.device) if self._resources.real else nullcontext():
                self._table.copy_(slots.table, non_blocking=True)

    def close(self) -> None:
        if self.slots is not None:
            self.slots.close()
        self.pinned.close()

    def prompt_steps(self, inputs: Mapping[str, torch.Tensor]) -> list[Executable]:
        """Those whose experts are streamed are for more tokens than those of the CPU."""
        sizes = self.plan.prompts
        if sizes is None:
            return super().prompt_steps(inputs)
        own = self._bind_all(Phase.PROMPT, sizes.by_cpu, inputs)
        for T, share in zip(sizes.split, sizes.shares, strict=True):
            own.append(self._step(self.compiled(Phase.SPLIT, T, share), inputs))
        streamed = self._streamed(sizes, inputs)
        return [*own, *(step for step in streamed if step.program.sizes["T"] >= sizes.alone)]

    def _streamed(self, sizes: PromptSizes, inputs: Mapping[str, torch.Tensor]) -> list[Executable]:
        """Steps whose experts cross: of another runner, unless those of some layers stay on the
        CPU."""
        if not sizes.streamed or not self.plan.streams_all(self.compiled().program):
            return self._bind_all(Phase.STREAMED, sizes.streamed, inputs)
        self.prepare(inputs)
        self.prefill_runner = runner = StreamedRunner(self._resources, self.plan, sizes, self.slots)
        runner.bind(self._batch)
        return runner.steps
