"""A model on a GPU, as the engine drives it: its programs as CUDA graphs, experts on the CPU where
they do not fit."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from pykernels.errors import PykernelsError

from ...experts.cache import CachePolicy
from ...kv_cache.layout import PAGE
from ...machine.pinned import Pinned
from ...passes import defer
from ...passes.gpu_metadata import gpu_metadata
from ...passes.layers import check_routed, moe_layers
from ...planning.kept_rates import kept_rates
from ...planning.placement import CPU, Placement
from ...planning.prefill_rates import Rates
from ...planning.prompt_sizes import HOST_BUCKETS, SPLIT_BUCKETS, PromptSizes
from ...program import Program
from ...program.partition import partition
from ...program.sizes import ONE_TOKEN, StepSizes
from ...program.weights import LayoutOf
from ...runner.batch import StepBatch, StepResult
from ...runner.measured_deferral import measured_deferral
from ...runner.measured_rates import measured_rates
from ...runner.paged_runner import Executable, Lowerable, PagedRunner, Pass
from ...runner.slots import Slots
from ...workers.pool import WorkerPool
from ...workers.threads import spin_budget
from ..gpus import HEADROOM, Gpus, check_device, free_bytes, gpus_of, interpreted, several_refused
from .binders.attention import check_heads
from .binders.sampling import waits_for_masks
from .executable import CudaExecutable
from .memory.buffers import allocated_caches, dtypes
from .memory.capacity import place_on, step_bytes, step_tokens
from .memory.dense import described, pin_staged
from .memory.experts import on_gpu
from .memory.weights import layouts
from .resources import CudaResources, check_waits
from .step_maker import StepMaker
from .streamed_runner import StreamedRunner
from .streaming import Streaming, wanted_streaming

DECODE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512)
PROMPT_BUCKETS = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072)
"""Buckets of steps with chunks of prompts, besides the largest one: a step computes at most half
as much again as it has tokens for, and experts nothing for padding."""
MOST_SPLIT = 0.95
"""Share of the experts for which a split step must have room."""
HALF = 0.5
"""Share of the experts that cross where no rates are known: in Triton's interpreter."""


@dataclass(frozen=True)
class CudaOptions:
    """Options of a ``CudaRunner``: where experts and layers are computed, and how.

    Attributes:
        experts: where routed experts are: "cpu", "gpu", or "auto": on the GPU if all fit.
        deferred: experts of a token of an output that join one layer later; None: as many as keep
            the CPU busy, found by measuring.
        dual_batch: whether decode steps of two sequences or more have two lanes; "auto": if the
            experts are on the CPU.
        placed: weights that rules place on another device, by name.
        gpu_experts: by layer, experts that are on the GPU besides, where the others are not.
        by_layer: GPUs of the layers that are not on the first one; None: they are dealt by size.
        prefill: where the experts on the CPU are computed in steps with chunks of prompts: "cpu";
            "stream": on the GPU, to which they cross; "split": some there, the others on the CPU;
            "auto": as is fastest for so many tokens.
        slots: by layer, slots of the GPU for experts that change from step to step; ``policy``: by
            which they do.
        staged: dense weights that cross to their GPU in each step (``Placement.staged``).
    """

    experts: str = "auto"
    deferred: int | None = 0
    dual_batch: bool | str = False
    placed: Mapping[str, str] = field(default_factory=dict)
    gpu_experts: Mapping[int, Sequence[int]] | None = None
    by_layer: Mapping[int, str] | None = None
    prefill: str = "cpu"
    slots: Mapping[int, int] | None = None
    policy: CachePolicy | None = None
    staged: Mapping[str, int] = field(default_factory=dict)


class CudaRunner(PagedRunner):
    """See ``runner.batch.Runner``.

    Args:
        device: "cuda:N", or several of them, "cuda:0,cuda:1", which have the layers in this order;
            "cpu" in Triton's interpreter (``gpus_of``).
        pool: runs what is on the CPU: experts.
        max_num_batched_tokens: None: as ``capacity.STEP_TOKENS`` says.

    Attributes:
        gpus: by their names in programs.
        device: the last GPU, which samples.
        deferred: experts of a token of an output that join one layer later.
        streaming: how experts of prompts are streamed; None: they are not.
        rates: by which "auto" chooses, once programs are made; ``link_bytes_per_s``: from pinned
            memory to the GPU, 0 where nothing is streamed.

    Raises:
        PykernelsError: no such GPU, too little of its memory, a kernel that cannot run there;
            experts that cannot be streamed as asked for.
    """

    decode_buckets = DECODE_BUCKETS
    copies_inputs = True
    pool: WorkerPool

    def __init__(
        self,
        model: Lowerable,
        device: str,
        pool: WorkerPool,
        max_model_len: int,
        num_pages: int | None = None,
        max_num_batched_tokens: int | None = None,
        max_num_seqs: int = 16,
        kernel: str = "auto",
        passes: Sequence[Pass] = (),
        max_num_logits: int | None = None,
        options: CudaOptions = CudaOptions(),  # noqa: B008 - frozen
    ) -> None:
        check_device(device)
        check_heads(model.lower())
        self.gpus: Gpus = gpus_of(device)
        self.device = list(self.gpus.values())[-1]
        pages = num_pages or 2 * -(-max_model_len // PAGE)
        placement = place_on(
            self.gpus, model, pages, options.experts, options.placed, options.by_layer
        )
        self.placement = replace(
            placement,
            cached=options.gpu_experts or {},
            slots=options.slots or {},
            staged=options.staged,
        )
        self._policy = options.policy or CachePolicy()
        if options.slots and len(self.gpus) > 1:
            raise PykernelsError(*several_refused("an expert cache"))
        on_cpu = self.placement.experts == CPU
        if options.dual_batch is True and not on_cpu:
            check_routed(model.lower(), "dual_batch")
            raise PykernelsError(
                "dual_batch with the experts on the GPU: there is nothing beside which the other"
                " lane could run",
                "Keep the experts on the CPU (experts cpu), or leave dual_batch off",
            )
        check_waits(self.gpus, pool if on_cpu else None)
        tokens, deferred = max_num_batched_tokens, options.deferred or 0
        # What is deferred takes memory; of how many experts it is makes no difference.
        some = deferred or (1 if options.deferred is None and on_cpu else 0)
        rows, table_pages = max(max_num_logits or 0, max_num_seqs), -(-max_model_len // PAGE)
        sizes = StepSizes(1, max_num_seqs, rows, pages, table_pages)
        self.prefill, self.link_bytes_per_s = options.prefill, 0.0
        self.rates: Rates | None = None
        self.streaming = wanted_streaming(
            options.prefill, model, self.gpus, self.placement, sizes, some, tokens
        )
        if tokens is None and self.streaming is not None:
            tokens = self.streaming.tokens
        if tokens is None:
            tokens = step_tokens(model, self.gpus, self.placement, sizes, some)
        super().__init__(
            model,
            max_model_len,
            pages,
            tokens,
            max_num_seqs,
            passes,
            max_num_logits,
            on_cpu and bool(options.dual_batch),
            deferred,
        )
        self.pool, self.kernel = pool, kernel
        self.late_masks = waits_for_masks(self.device)
        self._auto_defer = on_cpu and options.deferred is None
        self.buckets = HOST_BUCKETS if on_cpu else PROMPT_BUCKETS
        self.caches: dict[str, torch.Tensor] = {}
        self._resources = CudaResources(
            model,
            self.gpus,
            self.placement,
            pool,
            kernel,
            self.step_sizes(table_pages),
            max_model_len,
            self.caches,
            self.last_sizes,
        )
        self._maker: StepMaker | None = None
        self._host_inputs: Mapping[str, torch.Tensor] = {}
        self.pinned = Pinned()

    @property
    def real(self) -> bool:
        """Whether there is a GPU, and not Triton's interpreter."""
        return not interpreted(self.gpus)

    def lowered(self, sizes: StepSizes = ONE_TOKEN) -> Program:
        """The model's program: routed experts on the CPU or a GPU, all else on GPUs."""
        return self._placed(self.placement, sizes)

    def lowered_streamed(self, sizes: StepSizes = ONE_TOKEN) -> Program:
        """The same without slots whose experts change: they do so beside streamed steps."""
        return self._placed(replace(self.placement, slots={}), sizes)

    def _lowered_split(self, sizes: StepSizes = ONE_TOKEN) -> Program:
        """The same without any experts on the GPU: a split step brings those that it takes most."""
        return self._placed(replace(self.placement, slots={}, cached={}), sizes)

    def _placed(self, placement: Placement, sizes: StepSizes) -> Program:
        return placement.apply(super().lowered(sizes))

    def make_slots(self) -> Slots | None:
        if not self.placement.slots:
            return None
        program = self.lowered()
        slots, self._table = on_gpu(program, self.weights, self.device, self._policy, self.pinned)
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
        program = self._staged(program)
        layout_of = layouts(program, self.gpus, dtypes(program))
        nodes = {node.name: node for node in program.nodes}
        return lambda node, port: layout_of(nodes[node.name], port)

    def _staged(self, program: Program) -> Program:
        loaded = any(node.op == "load_weights" for node in program.nodes)
        return program if loaded else self.placement.stage(program)

    def prompt_steps(self, inputs: Mapping[str, torch.Tensor]) -> list[Executable]:
        """Those whose experts are streamed are for more tokens than those of the CPU."""
        if self.real and self.streaming is not None:
            self.streaming = self._pin(self.streaming)
        if self.streaming is None:
            return super().prompt_steps(inputs)
        self._host_inputs = inputs
        program = self.lowered()
        # One GPU waits for the other: what crosses to both takes as long as to one of them.
        rate = partial(self.streaming.link_rate, program, self.weights)
        self.link_bytes_per_s = min(map(rate, self.gpus.values()))
        whole = self.streaming.whole(program)  # else those of some layers stay on the CPU
        sizes = self._prompt_sizes(program, inputs, whole and self._can_split(inputs))
        own = self._bind_all(sizes.by_cpu, inputs, (), self.make_step)
        own += [self._prompt_step(T, self._share(T)) for T in sizes.split]
        if whole and sizes.streamed:
            self._prepare(inputs)
            self.prefill_runner = StreamedRunner(
                self._resources, sizes, self.streaming, self.deferred, self.slots
            )
            self.prefill_runner.bind(self._batch)
            streamed = self.prefill_runner.steps
        else:
            passes = (self.streaming.apply,)
            streamed = self._bind_all(sizes.streamed, inputs, passes, self.make_step)
        return [*own, *(step for step in streamed if step.program.sizes["T"] >= sizes.alone)]

    def _prompt_sizes(
        self, program: Program, inputs: Mapping[str, torch.Tensor], may_split: bool
    ) -> PromptSizes:
        """The sizes of steps by each way, as is asked for or by measured rates."""
        most = self.max_num_batched_tokens
        if self.prefill == "stream":
            return PromptSizes.streamed_only(most)
        if self.prefill == "split":
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
        if self.prefill == "split":
            return PromptSizes.split_only(most)
        sizes = PromptSizes.chosen(self.rates, most, may_split, self.max_num_seqs)
        self.decisions = [*self.decisions, sizes.described(self.rates)]
        return sizes

    def _can_split(self, inputs: Mapping[str, torch.Tensor]) -> bool:
        """Whether there are kernels for split steps, and memory beside that of streamed ones."""
        streaming = self.streaming
        assert streaming is not None
        if not streaming.gathers(self.lowered()):
            return False
        if not self.real:
            return True
        self._prepare(inputs)
        needed, most = Counter[str](), self.max_num_batched_tokens
        split = partial(streaming.split, share=MOST_SPLIT)
        ways = (
            (most, self.lowered_streamed, streaming.apply),
            (min(most, SPLIT_BUCKETS[-1]), self._lowered_split, split),
        )
        for T, lower, rewrite in ways:
            sizes = self.step_sizes(inputs["page_table"].shape[1])
            program = rewrite(lower(sizes.of(T)))
            program = defer(program, self.deferred)
            for name, part in partition(self.placement.stage(program)).items():
                needed[name] += step_bytes(part) if name in self.gpus else 0
        return all(n - HEADROOM >= needed[name] for name, n in free_bytes(self.gpus).items())

    def _prompt_step(self, T: int, share: float) -> Executable:
        """A step in which that share of the experts crosses."""
        if not share:
            return self._step(T, self._host_inputs, (), self.make_step)
        assert self.streaming is not None
        split = (partial(self.streaming.split, share=share),)
        return self._step(T, self._host_inputs, split, self.make_step, self._lowered_split)

    def _share(self, T: int) -> float:
        return HALF if self.rates is None else self.rates.share(T)

    def _pin(self, streaming: Streaming) -> Streaming | None:
        """With as many layers as can be pinned; None if there is none."""
        with torch.cuda.device(self.device):
            program = self.lowered()
            found, reason = streaming.pin(program, self.weights, self.pinned)
        if not reason:
            return found
        if self.prefill == "split" or (self.prefill == "stream" and not found.layers):
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
        if not self._auto_defer:
            return
        self.deferred = 0
        step = self._step(1, inputs, (), self.make_decode_step)
        if not isinstance(step, CudaExecutable) or step.cpu is None:
            return
        # One token at the first place of the cache, which nobody reads before it is written.
        self.sizes[0], self.sizes[1], self.sizes[2] = 1, 1, 0
        inputs["slot_mapping"][0] = 0
        self.deferred = measured_deferral(step.program, step.cpu.jobs.jobs, step.run)

    def launch(self, batch: StepBatch) -> None:
        with self._resources.watched():
            super().launch(batch)

    def result(self) -> StepResult:
        with self._resources.watched():
            return super().result()

    def make_step(self, program: Program, inputs: Mapping[str, torch.Tensor]) -> CudaExecutable:
        return self._made(program, inputs, False)

    def make_decode_step(
        self, program: Program, inputs: Mapping[str, torch.Tensor]
    ) -> CudaExecutable:
        return self._made(program, inputs, True)

    def _made(
        self, program: Program, inputs: Mapping[str, torch.Tensor], decode: bool
    ) -> CudaExecutable:
        self._prepare(inputs)
        assert self._maker is not None
        return self._maker.make(program, decode)

    def _prepare(self, inputs: Mapping[str, torch.Tensor]) -> None:
        """Allocates the caches, and what all steps share."""
        if self._maker is not None:
            return
        if self.real:  # a layer of the GPU is shorter than waking a sleeper
            self.pool.spin_for(spin_budget(driver_works=False))
        with self._resources.enough_memory():
            program = self.lowered()
            if self.placement.staged:
                self.decisions = [*self.decisions, described(self.placement, program)]
            if self.placement.staged and self.real:
                staged = self._staged(program)
                pin_staged(staged, self.weights, self.layouts(staged), self.pinned)
            whole = gpu_metadata(self.lowered(self.step_sizes().of(1)))
            allocated = allocated_caches(whole, self.gpus)
            self.caches.update({**allocated, **self.caches})  # tables of ``make_slots`` stay
            self._maker = StepMaker(
                self._resources,
                self.lowered(StepSizes(self.max_num_batched_tokens)),
                inputs,
                self._sampling,
                self.sizes,
                high_priority=True,
            )
