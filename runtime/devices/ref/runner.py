"""A model on the ref device, as the engine drives it: exact and slow, what others are held to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from pykernels.errors import PykernelsError

from ...experts.cache import BetweenSteps, CachePolicy
from ...passes import expert_cache, stream_weights
from ...program import Program
from ...program.sizes import ONE_TOKEN, StepSizes
from ...runner.paged_runner import Executable, Lowerable, PagedRunner, Pass
from ...runner.slots import Slots, slot_specs
from ...workers.pool import WorkerPool
from ..cpu import weights as cpu
from .step import RefExecutable
from .weights import exact_experts, layouts

_EXACT = {torch.bfloat16: torch.float32}


def on_ref(program: Program) -> Program:
    """The program with every node on the ref device, and float32 for bfloat16 in the cache."""
    return replace(
        program.on("ref"),
        buffers={
            name: replace(buffer, dtype=_EXACT.get(buffer.dtype, buffer.dtype))
            for name, buffer in program.buffers.items()
        },
    ).check()


class RefRunner(PagedRunner):
    """See ``runner.batch.Runner``: the reference ops in float32, the cache too where it would be
    bfloat16.

    Args:
        pool: for programs that hand experts to the ``cpu`` device, in the kernels' precision.
        passes: of ``runtime.passes``, for the programs of decode steps; ``offload`` is one.
        dual_batch: whether decode steps of two sequences or more have two lanes.
        slots: by layer, slots for experts, as beside a GPU; ``policy``: of what is in them.
        deferred, state_slots: see ``PagedRunner``.
        prefill: "stream": steps with chunks of prompts copy their experts first, as beside a GPU.
    """

    layouts = staticmethod(layouts)

    def __init__(
        self,
        model: Lowerable,
        max_model_len: int,
        num_pages: int | None = None,
        max_num_batched_tokens: int = 512,
        max_num_seqs: int = 16,
        passes: Sequence[Pass] = (),
        pool: WorkerPool | None = None,
        max_num_logits: int | None = None,
        dual_batch: bool = False,
        prefill: str = "cpu",
        slots: Mapping[int, int] | None = None,
        policy: CachePolicy | None = None,
        deferred: int = 0,
        state_slots: int | None = None,
    ) -> None:
        super().__init__(
            model,
            max_model_len,
            num_pages,
            max_num_batched_tokens,
            max_num_seqs,
            passes,
            max_num_logits,
            dual_batch,
            deferred,
            state_slots,
        )
        self.pool = pool
        self.streams = prefill == "stream"
        self._room, self._policy = slots or {}, policy or CachePolicy()
        if self.streams and len(model.store.nodes) > 1:
            raise PykernelsError(
                "the ref device streams whole experts, not slices on NUMA nodes", "Use numa off"
            )
        self.caches = {
            name: replace(part, dtype=_EXACT.get(part.dtype, part.dtype)).zeros()
            for name, part in model.caches(self.num_pages, self.state_slots).items()
        }

    def lowered(self, sizes: StepSizes = ONE_TOKEN) -> Program:
        program = on_ref(super().lowered(sizes))
        return expert_cache(program, self._room) if self._room else program

    def make_slots(self) -> Slots | None:
        if not self._room:
            return None
        program = self.lowered()
        layers = [self.weights.get(s, cpu.HERE, exact_experts) for s in slot_specs(program)]
        filler = BetweenSteps(lambda move: layers[move.layer].put(move.slot, move.expert))
        slots = Slots(program, self._policy, filler)
        self.caches |= slots.tables
        return slots

    def prompt_steps(self, inputs: Mapping[str, torch.Tensor]) -> list[Executable]:
        if not self.streams:
            return super().prompt_steps(inputs)
        streamed = partial(stream_weights, room=lambda spec: spec.nbytes)
        return self._bind_all(self._sizes(self.buckets), inputs, (streamed,), self.make_step)

    def make_step(self, program: Program, inputs: Mapping[str, torch.Tensor]) -> RefExecutable:
        return RefExecutable(
            program, self.weights, inputs, self.caches, self.pool, sizes=self.sizes
        )
