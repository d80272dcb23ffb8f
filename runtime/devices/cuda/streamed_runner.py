"""Steps of prompts whose experts are streamed, beside the steps of another runner (OSDI 3.3.2).

They need no worker of the CPU, so requests decode meanwhile: those steps share the GPU, which works
for a part of the time in which experts cross, and main memory, of which the link reads a part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch

from ...planning.execution import ExecutionPlan, Phase
from ...planning.prompt_sizes import PromptSizes
from ...runner.batch import StepBatch, StepResult
from ...runner.paged_runner import Executable
from ...runner.slots import Slots
from .executable import CudaExecutable
from .lane import CudaLane
from .resources import CudaResources


class StreamedRunner(CudaLane):
    """See ``runner.batch.PrefillRunner``.

    Args:
        resources: the caches are there.
        sizes: of its steps, and from which on they are for it.
        slots: of decode steps, whose experts are to be those that prompts take; None: none are.
    """

    largest = Phase.STREAMED
    high_priority = False

    def __init__(
        self,
        resources: CudaResources,
        plan: ExecutionPlan,
        sizes: PromptSizes,
        slots: Slots | None,
    ) -> None:
        super().__init__(resources, replace(plan, passes=(), dual_batch=False))
        self.min_tokens, self.min_alone = sizes.beside, sizes.alone
        self.max_others = sizes.not_streamed
        self.buckets, self._decode_slots = sizes.streamed, slots
        # Not the stream of decode steps, which would wait for these.
        devices = resources.gpus.values() if resources.real else ()
        self._streams = [torch.cuda.Stream(device) for device in devices]

    def bind(self, batch: StepBatch) -> None:
        for stream in self._streams:  # weights and caches are on their way
            torch.cuda.synchronize(stream.device)
        with self._own_streams():
            super().bind(batch)

    def prompt_steps(self, inputs: Mapping[str, torch.Tensor]) -> list[Executable]:
        steps = self._bind_all(Phase.STREAMED, self._sizes(self.buckets), inputs)
        if self._decode_slots is not None:
            for step in steps:
                choices = {name: tensor.numpy() for name, tensor in step.outputs.items()}
                self._decode_slots.add(step, step.program, choices)
        return steps

    def has_decode_steps(self) -> bool:
        return False

    def allocate(self) -> None:
        """The runner beside which this one runs has done so."""

    def launch(self, batch: StepBatch) -> None:
        with self._own_streams():
            super().launch(batch)

    def ready(self) -> bool:
        """Whether ``result`` need not wait."""
        step = self._executable
        assert isinstance(step, CudaExecutable)
        return step.ready()

    def result(self) -> StepResult:
        found = super().result()
        if self._decode_slots is not None:  # what prompts take says what decode steps will
            self._decode_slots.ended(self._executable, self.sizes.tolist(), False)
        return found

    @contextmanager
    def _own_streams(self) -> Iterator[None]:
        """Launches within it do not wait for decode steps."""
        with ExitStack() as around:
            for stream in self._streams:
                around.enter_context(torch.cuda.stream(stream))
            yield
