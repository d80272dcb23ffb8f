"""A model on the ref device, as the engine drives it: exact and slow, what others are held to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from pykernels.errors import PykernelsError

from ...experts.cache import BetweenSteps, CachePolicy
from ...passes.on_ref import exact
from ...planning.compile import Compiled
from ...planning.execution import ExecutionPlan
from ...planning.lowerable import Lowerable
from ...planning.residency import Filled
from ...runner.expert_slots import ExpertSlots, expert_slot_specs
from ...runner.paged_runner import PagedRunner
from ...workers.pool import WorkerPool
from ..cpu import weights as cpu
from .step import RefExecutable
from .weights import exact_experts, layouts


class RefRunner(PagedRunner):
    """See ``runner.batch.Runner``: the reference ops in float32, the cache too where it would be
    bfloat16.

    Args:
        plan: all on the ref device, or the routed experts on the CPU, in the kernels' precision.
        pool: of the CPU's part.

    Raises:
        PykernelsError: experts that are streamed from several NUMA nodes.
    """

    layouts = staticmethod(layouts)

    def __init__(
        self,
        model: Lowerable,
        plan: ExecutionPlan,
        pool: WorkerPool | None = None,
    ) -> None:
        super().__init__(model, plan)
        self.pool = pool
        if plan.streaming and len(model.store.nodes) > 1:
            raise PykernelsError(
                "the ref device streams whole experts, not slices on NUMA nodes", "Use numa off"
            )
        self.caches = {
            name: replace(part, dtype=exact(part.dtype)).zeros()
            for name, part in model.caches(*plan.sizes.of_caches).items()
        }

    def make_expert_slots(self) -> ExpertSlots | None:
        if not self.plan.placement.filled(Filled.BETWEEN_STEPS):
            return None
        program = self.compiled().program
        layers = [
            self.weights.get(s, cpu.CPU_DEVICE, exact_experts) for s in expert_slot_specs(program)
        ]
        filler = BetweenSteps(lambda move: layers[move.layer].put(move.slot, move.expert))
        slots = ExpertSlots(program, self.plan.policy or CachePolicy(), filler)
        self.caches |= slots.tables
        return slots

    def make_step(self, compiled: Compiled, inputs: Mapping[str, torch.Tensor]) -> RefExecutable:
        return RefExecutable(
            compiled, self.weights, inputs, self.caches, self.pool, sizes=self.sizes
        )
