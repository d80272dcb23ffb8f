"""A model on a GPU, as the engine drives it: its programs as CUDA graphs, experts on the CPU where
they do not fit."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch

from pykernels.errors import PykernelsError

from ...experts.cache import CachePolicy
from ...machine.pinned import Pinned
from ...passes.layers import moe_layers
from ...planning.compile import Compiled
from ...planning.execution import ExecutionPlan, Phase
from ...planning.gpu.capacity import on_gpus, step_bytes
from ...planning.gpu.dense import described
from ...planning.gpu.kept_rates import kept_rates
from ...planning.gpu.prefill_rates import Rates
from ...planning.gpu.prompt_sizes import HOST_BUCKETS, SPLIT_BUCKETS, PromptSizes
from ...planning.lowerable import Lowerable
from ...planning.placement import CPU
from ...planning.streaming import Streaming
from ...program import Program
from ...program.step_inputs import STATE_SLOTS
from ...program.weights import LayoutOf
from ...runner.batch import StepBatch, StepResult
from ...runner.measured_deferral import measured_deferral
from ...runner.measured_rates import measured_rates
from ...runner.paged_runner import Executable, PagedRunner
from ...runner.slots import Slots
from ...workers.pool import WorkerPool
from ...workers.threads import spin_budget
from ..gpus import Gpus, check_device, gpus_of, interpreted
from .binders.attention import check_heads
from .binders.sampling import waits_for_masks
from .executable import CudaExecutable
from .layouts import machine_of
from .memory.buffers import allocated_caches, dtypes
from .memory.dense import pin_staged
from .memory.experts import on_gpu
from .memory.weights import layouts
from .resources import CudaResources, check_waits
from .step_maker import StepMaker
from .streamed_runner import StreamedRunner
from .streaming import link_rate, pin_experts

DECODE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512)
PROMPT_BUCKETS = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072)
"""Buckets of steps with chunks of prompts, besides the largest one: a step computes at most half
as much again as it has tokens for, and experts nothing for padding."""
MOST_SPLIT = 0.95
"""Share of the experts for which a split step must have room."""
HALF = 0.5
"""Share of the experts that cross where no rates are known: in Triton's interpreter."""


class CudaRunner(PagedRunner):
    """See ``runner.batch.Runner``.

    Args:
        plan: see ``planning.gpu.plan``.
        device: "cuda:N", or several of them, "cuda:0,cuda:1", which have the layers in this order;
            "cpu" in Triton's interpreter (``gpus_of``).
        pool: runs what is on the CPU: experts.

    Attributes:
        gpus: by their names in programs.
        device: the last GPU, which samples.
        rates: by which "auto" chooses, once programs are made; ``link_bytes_per_s``: from pinned
            memory to the GPU, 0 where nothing is streamed.

    Raises:
        PykernelsError: no such GPU, a kernel that cannot run there, or a driver that lets it not
            wait for the CPU.
    """

    decode_buckets = DECODE_BUCKETS
    copies_inputs = True
    pool: WorkerPool

    def __init__(
        self, model: Lowerable, plan: ExecutionPlan, device: str, pool: WorkerPool
    ) -> None:
        check_device(device)
        check_heads(model.lower())
        self.gpus: Gpus = gpus_of(device)
        self.device = list(self.gpus.values())[-1]
        on_cpu = plan.placement.experts == CPU
        check_waits(self.gpus, pool if on_cpu else None)
        super().__init__(model, replace(plan, nodes=pool.memory))
        self.pool, self.kernel = pool, plan.kernel
        self.rates: Rates | None = None
        self.link_bytes_per_s = 0.0
        self.late_masks = waits_for_masks(self.device)
        self.buckets = HOST_BUCKETS if on_cpu else PROMPT_BUCKETS
        self.caches: dict[str, torch.Tensor] = {}
        self._resources = CudaResources(
            model, self.gpus, pool, plan.kernel, plan.sizes, self.caches, self.last_steps
        )
        self._maker: StepMaker | None = None
        self._host_inputs: Mapping[str, torch.Tensor] = {}
        self.pinned = Pinned()

    @property
    def real(self) -> bool:
        """Whether there is a GPU, and not Triton's interpreter."""
        return not interpreted(self.gpus)

    @property
    def streaming(self) -> Streaming | None:
        """How experts of prompts are streamed; None: they are not."""
        return self.plan.streaming

    def make_slots(self) -> Slots | None:
        if not self.plan.placement.slots:
            return None
        program, policy = self.compiled().program, self.plan.policy or CachePolicy()
        slots, self._table = on_gpu(program, self.weights, self.device, policy, self.pinned)
        self.caches.update(zip(slots.tables, self._table, strict=True))
        return slots

    def before_slots(self, slots: Slots) -> None:
        if slots.before_step():
            with torch.cuda.device(self.device) if self.real else nullcontext():
                self._table.copy_(slots.table, non_blocking=True)

    def close(self) -> None:
        if self.slots is not None:
            self.slots.close()
        self.pinned.close()

    def layouts(self, program: Program) -> LayoutOf:
        return layouts(program, self.gpus, dtypes(program))

    def prompt_steps(self, inputs: Mapping[str, torch.Tensor]) -> list[Executable]:
        """Those whose experts are streamed are for more tokens than those of the CPU."""
        if self.real and self.streaming is not None:
            self.plan = replace(self.plan, streaming=self._pin(self.streaming))
        streaming = self.streaming
        if streaming is None:
            return super().prompt_steps(inputs)
        self._host_inputs = inputs
        program = self.compiled().program
        # One GPU waits for the other: what crosses to both takes as long as to one of them.
        rates = [link_rate(streaming, program, self.weights, gpu) for gpu in self.gpus.values()]
        self.link_bytes_per_s = min(rates)
        whole = streaming.whole(program)  # else those of some layers stay on the CPU
        sizes = self._prompt_sizes(program, inputs, whole and self._can_split())
        own = self._bind_all(Phase.PROMPT, sizes.by_cpu, inputs)
        own += [self._prompt_step(T, self._share(T)) for T in sizes.split]
        if whole and sizes.streamed and not self.model.states:  # copied between steps only
            self._prepare(inputs)
            runner = StreamedRunner(self._resources, self.plan, sizes, self.slots)
            self.prefill_runner = runner
            runner.bind(self._batch)
            streamed = runner.steps
        else:
            streamed = self._bind_all(Phase.STREAMED, sizes.streamed, inputs)
        return [*own, *(step for step in streamed if step.program.sizes["T"] >= sizes.alone)]

    def _prompt_sizes(
        self, program: Program, inputs: Mapping[str, torch.Tensor], may_split: bool
    ) -> PromptSizes:
        """The sizes of steps by each way, as is asked for or by measured rates."""
        most, prefill = self.max_num_batched_tokens, self.plan.prefill
        if prefill == "stream":
            return PromptSizes.streamed_only(most)
        if prefill == "split":
            if not may_split:
                raise PykernelsError(
                    "experts of prompts cannot be split: some are not pinned, too little memory"
                    " of the GPU for two layers of them twice, or no kernel that gathers them",
                    "Leave prefill at auto, or give expert_cache fewer slots",
                )
            if not self.real:
                return PromptSizes.split_only(most)
        assert self.streaming is not None
        stream_s = self.streaming.nbytes(program) / self.link_bytes_per_s
        longest = min(most, self.max_model_len)
        measure = partial(
            measured_rates,
            self._prompt_step,
            inputs,
            self.sizes,
            longest,
            self.vocab_size,
            stream_s,
            may_split,
        )
        machine = self.gpus.values(), self.pool.threads, self.kernel
        self.rates = kept_rates(program, *machine, (longest, may_split), stream_s, measure)
        if prefill == "split":
            return PromptSizes.split_only(most)
        sizes = PromptSizes.chosen(self.rates, most, may_split, self.max_num_seqs)
        self.decisions = [*self.decisions, sizes.described(self.rates)]
        return sizes

    def _can_split(self) -> bool:
        """Whether there are kernels for split steps, and memory beside that of streamed ones."""
        streaming, machine = self.streaming, machine_of(self.gpus, self.weights)
        assert streaming is not None
        specs = [spec for _, spec in streaming.experts(self.compiled().program)]
        if not all(map(machine.layouts.gathers, specs)):
            return False
        if not self.real:
            return True
        self._prepare(self._host_inputs)
        needed, most = Counter[str](), self.max_num_batched_tokens
        needed.update(step_bytes(machine, self.compiled(Phase.STREAMED, most)))
        few = min(most, SPLIT_BUCKETS[-1])
        needed.update(step_bytes(machine, self.compiled(Phase.SPLIT, few, MOST_SPLIT)))
        free = machine_of(self.gpus, self.weights).free  # less than before the caches
        return all(nbytes >= needed[gpu] for gpu, nbytes in free.items())

    def _prompt_step(self, tokens: int, share: float) -> Executable:
        """A step in which that share of the experts crosses."""
        phase = Phase.SPLIT if share else Phase.PROMPT
        return self._step(self.compiled(phase, tokens, share), self._host_inputs)

    def _share(self, T: int) -> float:
        return HALF if self.rates is None else self.rates.share(T)

    def _pin(self, streaming: Streaming) -> Streaming | None:
        """With as many layers as can be pinned; None if there is none."""
        with torch.cuda.device(self.device):
            program = self.compiled().program
            found, reason = pin_experts(streaming, program, self.weights, self.pinned)
        if not reason:
            return found
        prefill = self.plan.prefill
        if prefill == "split" or (prefill == "stream" and not found.layers):
            raise PykernelsError(f"experts cannot be streamed: {reason}", "Leave prefill at auto")
        layers = found.layers or ()
        warnings.warn(
            f"experts of {len(layers)} of {len(moe_layers(program))} layers are streamed to"
            f" {', '.join(self.gpus)} in prompts, the others computed by the CPU: {reason}",
            stacklevel=2,
        )
        return found if layers else None

    def choose_deferred(self, inputs: Mapping[str, torch.Tensor]) -> None:
        """The deferral that pays here, if that is asked for."""
        if not self.plan.measures_deferral:
            return
        step = self._step(self.compiled(Phase.DECODE), inputs)
        if not isinstance(step, CudaExecutable) or step.cpu is None:
            return
        # One token at the first place of the cache, which nobody reads before it is written.
        self.sizes[0], self.sizes[1], self.sizes[2] = 1, 1, 0
        inputs["slot_mapping"][0] = inputs[STATE_SLOTS][0] = 0
        deferred = measured_deferral(step.program, step.cpu.jobs.jobs, step.run)
        self.plan = replace(self.plan, deferred=deferred)

    def launch(self, batch: StepBatch) -> None:
        with self._resources.watched():
            super().launch(batch)

    def result(self) -> StepResult:
        with self._resources.watched():
            return super().result()

    def make_step(self, compiled: Compiled, inputs: Mapping[str, torch.Tensor]) -> CudaExecutable:
        self._prepare(inputs)
        assert self._maker is not None
        return self._maker.make(compiled)

    def _prepare(self, inputs: Mapping[str, torch.Tensor]) -> None:
        """Allocates the caches, and what all steps share."""
        if self._maker is not None:
            return
        if self.real:  # a layer of the GPU is shorter than waking a sleeper
            self.pool.spin_for(spin_budget(driver_works=False))
        with self._resources.enough_memory():
            compiled = self.compiled()
            if self.plan.placement.staged:
                self.decisions = [*self.decisions, described(self.plan.placement, compiled.program)]
                for part in on_gpus(compiled.parts).values() if self.real else ():
                    pin_staged(part, self.weights, self.layouts(part), self.pinned)
            allocated = allocated_caches(compiled.program, self.gpus)
            self.caches.update({**allocated, **self.caches})  # tables of ``make_slots`` stay
            self._maker = StepMaker(
                self._resources,
                self.compiled(tokens=self.max_num_batched_tokens).program,
                inputs,
                self._sampling,
                self.sizes,
                high_priority=True,
            )
