"""Steps of prompts whose experts are streamed, in parallel with the steps of another runner (OSDI
3.3.2).

They need no worker of the CPU, so requests decode meanwhile: those steps share the GPU, which works
for a part of the time in which experts cross, and main memory, of which the link reads a part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch

from ...planning.compile import Compiled
from ...planning.execution import ExecutionPlan, Phase
from ...runner.batch import Route, StepBatch, StepResult
from ...runner.expert_slots import ExpertSlots
from ...runner.paged_runner import Executable
from .executable import CudaExecutable
from .resources import CudaResources
from .step_runner import CudaStepRunner


class StreamedRunner(CudaStepRunner):
    """See ``runner.batch.PrefillRunner``.

    Args:
        resources: the caches are there.
        plan: of the other runner; it says which steps are for this one.
        slots: of decode steps, whose experts are to be those that prompts take; None: none are.
    """

    largest = Phase.STREAMED
    high_priority = False
    decodes = False
    routes: Sequence[str] = (Route.STREAMED,)

    def __init__(
        self, resources: CudaResources, plan: ExecutionPlan, slots: ExpertSlots | None
    ) -> None:
        super().__init__(resources, replace(plan, passes=(), dual_batch=False))
        assert plan.prompts is not None
        self.min_tokens, self.min_alone = plan.prompts.min_tokens, plan.prompts.alone
        self.max_others, self._decode_expert_slots = plan.prompts.not_streamed, slots
        # Not the stream of decode steps, which would wait for these.
        devices = resources.gpus.values() if resources.real else ()
        self._streams = [torch.cuda.Stream(device) for device in devices]

    def bind(self, batch: StepBatch) -> None:
        for stream in self._streams:  # weights and caches are on their way
            torch.cuda.synchronize(stream.device)
        with self._own_streams():
            super().bind(batch)

    def bind_prompts(self, inputs: Mapping[str, torch.Tensor]) -> list[Executable]:
        own = [step for step in self.plan.prompt_steps() if step.phase is Phase.STREAMED]
        steps = self.bind_steps(own, inputs)
        if self._decode_expert_slots is not None:
            for step in steps:
                choices = {name: tensor.numpy() for name, tensor in step.outputs.items()}
                self._decode_expert_slots.add(step, step.program, choices)
        return steps

    def allocate(self, compiled: Compiled) -> None:
        """The runner beside which this one runs has done so."""

    def launch(self, batch: StepBatch) -> None:
        with self._own_streams():
            super().launch(batch)

    def take(self, route: str) -> None:
        """There is one way."""
        assert route in self.routes

    def ready(self) -> bool:
        """Whether ``result`` need not wait."""
        step = self._executable
        assert isinstance(step, CudaExecutable)
        return step.ready()

    def result(self) -> StepResult:
        step_result = super().result()
        if self._decode_expert_slots is not None:  # what prompts take says what decode steps will
            self._decode_expert_slots.ended(self._executable, self.sizes.tolist(), False)
        return step_result

    @contextmanager
    def _own_streams(self) -> Iterator[None]:
        """Launches within it do not wait for decode steps."""
        with ExitStack() as around:
            for stream in self._streams:
                around.enter_context(torch.cuda.stream(stream))
            yield
