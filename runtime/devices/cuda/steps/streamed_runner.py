"""Steps of prompts whose experts are streamed, beside the steps of another runner (OSDI 3.3.2).

They need no worker of the CPU, so requests decode meanwhile: those steps share the GPU, which works
for a part of the time in which experts cross, and main memory, of which the link reads a part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch

from ....planning.compile import Compiled
from ....planning.execution import Phase
from ....planning.gpu.prompt_sizes import PromptSizes
from ....runner.batch import StepBatch, StepResult
from ....runner.paged_runner import Executable, PagedRunner
from .executable import CudaExecutable
from .maker import StepMaker
from .owner import Owner


class StreamedRunner(PagedRunner):
    """See ``runner.batch.PrefillRunner``.

    Args:
        owner: whose weights and caches the steps use; they are there.
        sizes: of its steps, and from which on they are for it.
    """

    copies_inputs = True

    def __init__(self, owner: Owner, sizes: PromptSizes) -> None:
        super().__init__(owner.model, replace(owner.plan, passes=(), dual_batch=False))
        self.min_tokens, self.min_alone = sizes.beside, sizes.alone
        self.max_others = sizes.not_streamed
        self.buckets, self.pool = sizes.streamed, owner.pool
        self.device = owner.device
        self._owner = owner
        self._maker: StepMaker | None = None
        # Not the stream of the owner's steps, which would wait for these.
        devices = owner.gpus.values() if owner.real else ()
        self._streams = [torch.cuda.Stream(device) for device in devices]

    def bind(self, batch: StepBatch) -> None:
        for stream in self._streams:  # weights and caches are on their way
            torch.cuda.synchronize(stream.device)
        with self._own_streams():
            super().bind(batch)

    def prompt_steps(self, inputs: Mapping[str, torch.Tensor]) -> list[Executable]:
        steps = self._bind_all(Phase.STREAMED, self._sizes(self.buckets), inputs)
        if self._owner.slots is not None:
            for step in steps:
                choices = {name: tensor.numpy() for name, tensor in step.outputs.items()}
                self._owner.slots.add(step, step.program, choices)
        return steps

    def has_decode_steps(self) -> bool:
        return False

    def make_step(self, compiled: Compiled, inputs: Mapping[str, torch.Tensor]) -> CudaExecutable:
        if self._maker is None:
            with self._owner.enough_memory():
                self._maker = StepMaker(
                    self._owner, inputs, self._sampling, self.sizes, urgent=False
                )
        return self._maker.make(compiled)

    def launch(self, batch: StepBatch) -> None:
        with self._owner.watched(), self._own_streams():
            super().launch(batch)

    def ready(self) -> bool:
        """Whether ``result`` need not wait."""
        step = self._executable
        assert isinstance(step, CudaExecutable)
        return step.ready()

    def result(self) -> StepResult:
        with self._owner.watched():
            found = super().result()
        self._owner.last_step = self.last_step
        if self._owner.slots is not None:  # what prompts take says what decode steps will
            self._owner.slots.ended(self._executable, self.sizes.tolist(), False)
        return found

    @contextmanager
    def _own_streams(self) -> Iterator[None]:
        """Launches within it do not wait for the owner's steps."""
        with ExitStack() as around:
            for stream in self._streams:
                around.enter_context(torch.cuda.stream(stream))
            yield
