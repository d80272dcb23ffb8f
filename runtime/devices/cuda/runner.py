"""A model on a GPU, as the engine drives it: its programs as CUDA graphs, experts on the CPU where
they do not fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from pykernels.gpu.delta_net.copy_states import StateCopies

from ...experts.cache import CachePolicy
from ...kv_cache.page_store import PageStore
from ...passes.gpu_experts import expert_slot_tables
from ...passes.shard.join import replica
from ...planning.compile import compile
from ...planning.execution import ExecutionPlan, Phase
from ...planning.residency import Filled
from ...runner.batch import StepBatch
from ...runner.expert_slots import ExpertSlots
from ...runner.paged_runner import Executable
from ...runner.routed_prefill import RoutedPrefill
from ...workers.pool import WorkerPool
from ..gpus import Gpus
from .binders.sampling import waits_for_masks
from .calibrate import calibrated
from .memory.buffers import dtypes
from .memory.expert_slots import SlotsOnGpus
from .memory.pages import GpuPages
from .memory.replicas import Replicas
from .memory.weights import layouts
from .resources import CudaResources
from .step_runner import CudaStepRunner
from .streamed_runner import RoutedRunner, StreamedRunner


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
        first = (plan.placement.device,)
        super().__init__(resources.over(first) if plan.routes else resources, plan)
        self._every = resources
        self._replicas: Replicas | None = None
        self.gpus: Gpus = resources.gpus
        self.pinned = resources.pinned
        self.late_masks = waits_for_masks(self.device)
        self._state_copies: Sequence[StateCopies] = ()
        self.saves_states = bool(self.model.states)

    def finished(self) -> CudaRunner:
        if not self.plan.is_open:
            return self
        every = self._every
        return CudaRunner(every, calibrated(self._resources, self.plan, every.gpus))

    def make_expert_slots(self) -> ExpertSlots | None:
        if not self.plan.placement.filled(Filled.BETWEEN_STEPS):
            return None
        program, policy = self.compiled().program, self.plan.policy or CachePolicy()
        gpus = self._resources.gpus
        self._slots = SlotsOnGpus.of(program, self.weights, gpus, policy, self.pinned)
        self.caches.update(self._slots.rows)
        return self._slots.slots

    def page_store(self) -> PageStore:
        caches = {name: self.caches[name] for name in self._kv_names()}
        overwritten = None if self._replicas is None else self._replicas.overwritten
        return GpuPages(caches, self.model.states, self.pinned, overwritten)

    def load(self) -> None:
        super().load()
        for over in self.plan.routes.values():
            route = replace(self.plan, stream_over=over)
            if route.streaming is None or not route.streaming.streams_all(self.compiled().program):
                continue
            compiled = compile(self.model, route, Phase.STREAMED, self.max_num_batched_tokens)
            parts = compiled.parts.values()
            gpus = self._every.gpus
            self.weights.load(*((part, layouts(part, gpus, dtypes(part))) for part in parts))

    def launch(self, batch: StepBatch) -> None:
        if self._replicas is not None:
            self._replicas.written(batch.slot_mapping[: batch.T])
        super().launch(batch)

    def _kv_names(self) -> list[str]:
        """The caches of pages and states, as programs on a GPU have them."""
        program = self.compiled().program
        tables = expert_slot_tables(program)
        caches = (name for name, buffer in program.buffers.items() if buffer.kind == "cache")
        return [name for name in caches if name not in tables]

    def _streamed_runner(self) -> StreamedRunner | RoutedPrefill:
        """What runs streamed steps beside this one's: on the same GPU, or by a route over others,
        whose caches are allocated."""
        plan, every = self.plan, self._every
        if not plan.routes:
            return StreamedRunner(every, plan, self.expert_slots)
        names, others = self._kv_names(), dict[str, dict[str, torch.Tensor]]()
        for over in plan.routes.values():
            route = replace(plan, stream_over=over)
            largest = compile(self.model, route, Phase.STREAMED, self.max_num_batched_tokens)
            every.allocate_caches(largest)
            for gpu in over[over[0] == plan.placement.device :]:
                others[gpu] = {name: self.caches[replica(name, gpu)] for name in names}
        first = {name: self.caches[name] for name in names}
        replicas = self._replicas = Replicas(first, others, self.num_pages)
        return RoutedPrefill(
            {
                name: RoutedRunner(
                    every.over(over),
                    replace(plan, stream_over=over),
                    self.expert_slots,
                    name,
                    replicas,
                )
                for name, over in plan.routes.items()
            }
        )

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
            self._slots.update()

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
        across = [step for step in steps if step.phase is Phase.STREAMED]
        if across and self.plan.streams_apart(self.compiled().program, self.model):
            self.prepare(inputs)
            prefill_runner = self._streamed_runner()
            prefill_runner.bind(self._batch)
            self.prefill_runner, streamed = prefill_runner, prefill_runner.steps
        else:  # before the others, whose memory fits into that of these
            streamed = self.bind_steps(across, inputs)
            self.streams_from = sizes.alone if across else 0
        own = self.bind_steps([step for step in steps if step.phase is not Phase.STREAMED], inputs)
        return [*own, *(step for step in streamed if step.program.sizes["T"] >= sizes.alone)]
