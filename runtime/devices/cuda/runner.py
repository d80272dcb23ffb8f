"""A model on a GPU, as the engine drives it: its programs as CUDA graphs, experts on the CPU where
they do not fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import torch

from pykernels.gpu.delta_net.copy_states import StateCopies

from ...experts.cache import CachePolicy
from ...kv_cache.page_store import PageStore
from ...planning.execution import ExecutionPlan, Phase
from ...planning.residency import Filled
from ...runner.batch import StepBatch
from ...runner.expert_slots import ExpertSlots
from ...runner.paged_runner import Executable
from ...workers.pool import WorkerPool
from ..gpus import Gpus
from .binders.sampling import waits_for_masks
from .calibrate import calibrated
from .memory.experts import on_gpu
from .memory.pages import GpuPages
from .resources import CudaResources
from .step_runner import CudaStepRunner
from .streamed_runner import StreamedRunner


class CudaRunner(CudaStepRunner):
    """See ``runner.batch.Runner``.

    Args:
        plan: see ``planning.gpu.plan``; an open one to load weights by (``finished``).

    Attributes:
        gpus: by their names in programs.
        device: the last GPU, which samples.
    """

    pool: WorkerPool

    def __init__(self, resources: CudaResources, plan: ExecutionPlan) -> None:
        super().__init__(resources, plan)
        self.gpus: Gpus = resources.gpus
        self.pinned = resources.pinned
        self.late_masks = waits_for_masks(self.device)
        self._state_copies: Sequence[StateCopies] = ()

    def finished(self) -> CudaRunner:
        if not self.plan.is_open:
            return self
        return CudaRunner(self._resources, calibrated(self._resources, self.plan))

    def make_expert_slots(self) -> ExpertSlots | None:
        if not self.plan.placement.filled(Filled.BETWEEN_STEPS):
            return None
        program, policy = self.compiled().program, self.plan.policy or CachePolicy()
        slots, self._table = on_gpu(program, self.weights, self.device, policy, self.pinned)
        self.caches.update(zip(slots.tables, self._table, strict=True))
        return slots

    def page_store(self) -> PageStore:
        names = self.model.caches(1)
        caches = {name: self.caches[name] for name in names}
        return GpuPages(caches, self.model.states, self.pinned)

    def bind(self, batch: StepBatch) -> None:
        super().bind(batch)
        states = [self.caches[name] for name in self.model.states]
        devices = dict.fromkeys(state.device for state in states)
        self._state_copies = [
            StateCopies([state for state in states if state.device == device]) for device in devices
        ]
        self.copy_states([(0, 0)])  # compiles

    # Where the model was loaded in it, tensors can be changed in it only.
    @torch.inference_mode()
    def copy_states(self, copies: Sequence[tuple[int, int]]) -> None:
        """See ``runner.batch.Runner``; of all layers in one launch on each GPU."""
        for source, target in copies:
            for of_gpu in self._state_copies:
                of_gpu.copy(source, target)

    def update_expert_slots(self, slots: ExpertSlots) -> None:
        if slots.before_step():
            with torch.cuda.device(self.device) if self._resources.real else nullcontext():
                self._table.copy_(slots.table, non_blocking=True)

    def close(self) -> None:
        if self.expert_slots is not None:
            self.expert_slots.close()
        self.pinned.close()

    def bind_prompts(self, inputs: Mapping[str, torch.Tensor]) -> list[Executable]:
        """Those in which all experts cross are another runner's, unless some layers have theirs on
        the CPU, or states, which are copied between steps only."""
        steps, sizes = self.plan.prompt_steps(), self.plan.prompts
        if sizes is None:
            return self.bind_steps(steps, inputs)
        own = self.bind_steps([step for step in steps if step.phase is not Phase.STREAMED], inputs)
        across = [step for step in steps if step.phase is Phase.STREAMED]
        apart = bool(across) and not self.model.states
        if apart and self.plan.streams_all(self.compiled().program):
            self.prepare(inputs)
            self.prefill_runner = StreamedRunner(self._resources, self.plan, self.expert_slots)
            self.prefill_runner.bind(self._batch)
            streamed = self.prefill_runner.steps
        else:
            streamed = self.bind_steps(across, inputs)
        return [*own, *(step for step in streamed if step.program.sizes["T"] >= sizes.alone)]
