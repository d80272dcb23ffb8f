"""Steps of prompts whose experts are streamed, beside the steps of another runner (OSDI 3.3.2).

They need no worker of the CPU, so requests decode meanwhile: those steps share the GPU, which works
for a part of the time in which experts cross, and main memory, of which the link reads a part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch

from ...planning.compile import Compiled
from ...planning.execution import ExecutionPlan, Phase
from ...planning.gpu.prompt_sizes import PromptSizes
from ...runner.batch import StepBatch, StepResult
from ...runner.paged_runner import Executable, PagedRunner
from ...runner.slots import Slots
from .executable import CudaExecutable
from .resources import CudaResources
from .step_maker import StepMaker


class StreamedRunner(PagedRunner):
    """See ``runner.batch.PrefillRunner``.

    Args:
        resources: the caches are there.
        sizes: of its steps, and from which on they are for it.
        deferred: experts of a token of an output that join one layer later.
        slots: of decode steps, whose experts are to be those that prompts take; None: none are.
    """

    copies_inputs = True

    def __init__(
        self,
        resources: CudaResources,
        plan: ExecutionPlan,
        sizes: PromptSizes,
        slots: Slots | None,
    ) -> None:
        super().__init__(resources.model, replace(plan, passes=(), dual_batch=False))
        self.min_tokens, self.min_alone = sizes.beside, sizes.alone
        self.max_others = sizes.not_streamed
        self.buckets, self.pool = sizes.streamed, resources.pool
        self.device = resources.device
        self._resources, self._decode_slots = resources, slots
        self.last_steps = resources.last_steps
        self._maker: StepMaker | None = None
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

    def make_step(self, compiled: Compiled, inputs: Mapping[str, torch.Tensor]) -> CudaExecutable:
        if self._maker is None:
            with self._resources.enough_memory():
                self._maker = StepMaker(
                    self._resources,
                    self.compiled(Phase.STREAMED, self.max_num_batched_tokens).program,
                    inputs,
                    self._sampling,
                    self.sizes,
                    high_priority=False,
                )
        return self._maker.make(compiled)

    def launch(self, batch: StepBatch) -> None:
        with self._resources.watched(), self._own_streams():
            super().launch(batch)

    def ready(self) -> bool:
        """Whether ``result`` need not wait."""
        step = self._executable
        assert isinstance(step, CudaExecutable)
        return step.ready()

    def result(self) -> StepResult:
        with self._resources.watched():
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
