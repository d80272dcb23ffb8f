"""Steps of prompts whose experts are streamed, in parallel with the steps of another runner (OSDI
3.3.2).

They need no worker of the CPU, so requests decode meanwhile: those steps share the GPU, which works
for a part of the time in which experts cross, and main memory, of which the link reads a part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import numpy as np
import torch

from ...kv_cache.layout import PAGE
from ...planning.compile import Compiled
from ...planning.execution import ExecutionPlan, Phase
from ...runner.batch import Ints, StepBatch, StepResult
from ...runner.expert_slots import ExpertSlots
from ...runner.paged_runner import Executable
from ...runner.route import Route
from .memory.replicas import Replicas, pages_before
from .resources import CudaResources
from .step.executable import CudaExecutable
from .step.gate import Gate
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
        self._gate = self.gate = Gate(resources.real)
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
        self.resume()
        with self._own_streams():
            super().launch(batch)

    def take(self, route: str) -> None:
        """There is one way."""
        assert route in self.routes

    def park(self, seconds: float) -> None:
        """The step that runs waits at its next layer, for so long at most."""
        self._gate.close(seconds)

    def resume(self) -> None:
        """The step goes on."""
        self._gate.open()

    def ready(self) -> bool:
        """Whether ``result`` need not wait."""
        step = self._executable
        assert isinstance(step, CudaExecutable)
        with self._resources.watched():
            return step.ready()

    def result(self) -> StepResult:
        self.resume()
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


class RoutedRunner(StreamedRunner):
    """Streamed steps on the GPUs of one route.

    Args:
        resources: of these GPUs alone; ``plan``: with them as ``stream_over``.
        slots: see ``StreamedRunner``.
        name: of the route.
        replicas: the caches of all GPUs.
    """

    def __init__(
        self,
        resources: CudaResources,
        plan: ExecutionPlan,
        slots: ExpertSlots | None,
        name: str,
        replicas: Replicas,
    ) -> None:
        super().__init__(resources, plan, slots)
        self.routes = (name,)
        self._over, self._first, self._replicas = plan.stream_over, plan.placement.device, replicas
        self._pages: Ints | None = None  # that the first GPU does not have yet
        self._back: torch.cuda.Event | None = None

    def launch(self, batch: StepBatch) -> None:
        slots = batch.slot_mapping[: batch.T]
        before = batch.seq_lens[: batch.S] - batch.num_scheduled
        rows = batch.page_table_rows[: batch.S]
        with self._resources.watched(), self._own_streams():
            pages = pages_before(batch.page_tables, rows, before)
            self._replicas.bring(pages, self._over)
            super().launch(batch)
            self._replicas.written(slots, self._over)
            self._back = None
            self._pages = np.unique(slots // PAGE) if self._first not in self._over else None

    def ready(self) -> bool:
        if not super().ready():
            return False
        self._give_back()
        return self._back is None or self._back.query()

    def result(self) -> StepResult:
        step_result = super().result()
        self._give_back()
        if self._back is not None:
            with self._resources.watched():
                self._back.synchronize()
        return step_result

    def _give_back(self) -> None:
        """What the step has written goes to the GPU that decodes: its launches may have been made
        by other threads, behind which nothing can be put before they have ended."""
        if self._pages is not None:
            with self._resources.watched():
                self._back = self._replicas.give_back(self._pages, self._over[0])
            self._pages = None
