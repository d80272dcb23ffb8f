"""Steps on GPUs of which none runs while another one does: they share inputs and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import torch

from ...planning.compile import Compiled, compile
from ...planning.execution import ExecutionPlan, Phase
from ...program import Program
from ...program.weights import LayoutOf
from ...runner.batch import StepBatch, StepResult
from ...runner.paged_runner import PagedRunner
from .memory.buffers import dtypes
from .memory.weights import layouts
from .resources import CudaResources
from .step.executable import CudaExecutable
from .step.gate import Gate
from .step_builder import StepBuilder


class CudaStepRunner(PagedRunner):
    """What runners on GPUs share.

    Args:
        resources: which other step runners use, too.

    Attributes:
        largest: phase of the largest step.
        high_priority: whether its kernels go before those of other step runners.
        gate: at which its steps may be parked; None: nowhere.
    """

    copies_inputs = True
    largest: ClassVar[Phase] = Phase.PROMPT
    high_priority: ClassVar[bool] = True

    def __init__(self, resources: CudaResources, plan: ExecutionPlan) -> None:
        super().__init__(resources.model, plan)
        self.pool, self.device = resources.pool, resources.device
        self.caches, self.last_steps = resources.caches, resources.last_steps
        self._resources = resources
        self.gate: Gate | None = None
        self._step_builder: StepBuilder | None = None

    @property
    def decisions(self) -> Sequence[str]:
        peers = self._resources.peers.described
        return (*super().decisions, peers) if peers else super().decisions

    def layouts(self, program: Program) -> LayoutOf:
        return layouts(program, self._resources.gpus, dtypes(program))

    def make_step(self, compiled: Compiled, inputs: Mapping[str, torch.Tensor]) -> CudaExecutable:
        return self.prepare(inputs).make(compiled)

    def prepare(self, inputs: Mapping[str, torch.Tensor]) -> StepBuilder:
        """Allocates what all steps share, once."""
        if self._step_builder is None:
            with self._resources.enough_memory():
                largest = self.compiled(self.largest, self.max_num_batched_tokens)
                self.allocate(largest)
                self._step_builder = StepBuilder(
                    self._resources,
                    largest.program,
                    inputs,
                    self._sampling,
                    self.sizes,
                    self.high_priority,
                    self.gate,
                    self._whole if self.plan.stream_over[1:] else None,
                )
        return self._step_builder

    def _whole(self, tokens: int) -> Program:
        """The program of a streamed step before its tokens were dealt over GPUs."""
        alone = replace(self.plan, stream_over=())
        return compile(self.model, alone, Phase.STREAMED, tokens).program

    def allocate(self, compiled: Compiled) -> None:
        """Allocates and pins what the steps of all step runners share, by one of them."""
        self._resources.allocate(compiled, self.layouts)

    def launch(self, batch: StepBatch) -> None:
        with self._resources.watched():
            super().launch(batch)

    def result(self) -> StepResult:
        with self._resources.watched():
            return super().result()
