"""Where a model's nodes run on a machine that need not be here, by the engine's own planner, and
how much memory each device needs for that."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from pykernels.errors import PykernelsError
from runtime.devices.gpus import HEADROOM, gpus_of
from runtime.devices.sim.deferral import deferral_load, with_deferral
from runtime.devices.sim.machine import Gpu
from runtime.engine.scheduling.config import CONTEXT, STEP_TOKENS
from runtime.kv_cache.layout import PAGE
from runtime.passes.gpu.offload_kv import host_caches
from runtime.passes.layers import moe_layers
from runtime.planning.compile import Compiled, compile
from runtime.planning.execution import ExecutionPlan, Phase, largest_step
from runtime.planning.gpu.capacity import free_for_experts, step_bytes
from runtime.planning.gpu.fit import fitted
from runtime.planning.gpu.kv import bytes_in_main
from runtime.planning.gpu.machine import Machine as GpuMachine
from runtime.planning.gpu.plan import place_on, plan_on_gpus
from runtime.planning.gpu.routes import TENSOR, layer_gpus
from runtime.planning.placement import CPU
from runtime.planning.residency import Filled
from runtime.planning.windows import window_pages
from runtime.planning.work import work
from runtime.program import Program
from runtime.program.sizes import StepSizes

from ..checkpoint.memory import pages_of
from ..pinning.windows import cost_of
from .settings import Case
from .stretch import Stretch

GIB = 1 << 30
ROOM = 0.94
"""The part of main memory that a model may take: the system and Python have the rest."""


@dataclass(frozen=True)
class Memory:
    """Bytes of a device.

    Attributes:
        has: of it all; ``weights``, ``cache``, ``steps``: that are needed.
    """

    has: int
    weights: int
    cache: int
    steps: int

    @property
    def needed(self) -> int:
        """All that is needed."""
        return self.weights + self.cache + self.steps

    @property
    def free(self) -> int:
        """Bytes of the memory that nothing takes; below 0 where the model does not fit."""
        return self.has - self.needed


@dataclass(frozen=True)
class Placed:
    """A case with its plan.

    Attributes:
        memory: by device; ``room``: bytes of the GPU for experts besides.
        programs: that were compiled already.
        kv_tokens: that a server's cache has to be given for these sequences; 0: it has as many.
    """

    case: Case
    plan: ExecutionPlan
    memory: Mapping[str, Memory]
    room: int = 0
    kv_tokens: int = 0
    programs: dict[tuple[object, ...], Compiled] = field(default_factory=dict)

    def compiled(
        self, phase: Phase, tokens: int, share: float = 0.0, over: tuple[str, ...] = ()
    ) -> Compiled:
        """What a step runs, see ``planning.compile.compile``.

        Args:
            over: GPUs of the route of a streamed step; none: the plan's.
        """
        key = phase, tokens, share, over
        if key not in self.programs:
            plan = replace(self.plan, stream_over=over) if over else self.plan
            self.programs[key] = compile(self.case.subject.decoder, plan, phase, tokens, share)
        return self.programs[key]

    def with_slots(self, slots: int) -> Placed:
        """The same with slots of each layer for experts that change from step to step."""
        case = replace(self.case, slots=slots)
        return replace(self, case=case, plan=_with_slots(case, self.plan), programs={})

    @property
    def fits(self) -> bool:
        """Whether every device has memory enough."""
        return all(each.free >= 0 for each in self.memory.values())


def placed(case: Case, whole: bool = False) -> Placed:
    """The plan that the engine would make of a case on its machine.

    Args:
        whole: of a model with some of its layers, the memory that all of them take counts.

    Raises:
        PykernelsError: options that exclude each other; a GPU that the machine has not; a context
            beyond the model's.
    """
    wanted, execution, subject = case.wanted, case.execution, case.subject
    if wanted.positions > subject.positions:
        raise PykernelsError(
            f"a context of {wanted.positions} tokens, and the model was made for"
            f" {subject.positions}",
            f"Give --context, --prompt and --answer that come to {subject.positions} at most",
        )
    stretch = Stretch(subject if whole else replace(subject, stretch=1.0))
    sizes, kv_tokens = _sizes(case, stretch)
    has = int(case.machine.cpu.memory_gib * ROOM * GIB)
    if not execution.on_gpu:
        plan = ExecutionPlan(
            sizes.of(sizes.tokens or max(STEP_TOKENS, sizes.sequences)),
            deferred=execution.deferred,
            max_model_len=wanted.positions,
        )
        caches = subject.decoder.caches(*sizes.of_caches)
        cache = sum(part.nbytes for part in caches.values())
        every = stretch.all_weights
        return Placed(case, plan, {CPU: Memory(has, every, cache, 0)}, kv_tokens=kv_tokens)
    gpus = list(gpus_of(execution.device))
    missing = [name for name in gpus if name not in case.machine.gpus]
    if missing:
        there = ", ".join(case.machine.gpus) or "none"
        hint = "Give one of these" if case.machine.gpus else "Leave out --device"
        raise PykernelsError(f"{case.machine.name} has no {missing[0]}: its GPUs are {there}", hint)
    return replace(_on_gpus(case, gpus, sizes, has, stretch), kv_tokens=kv_tokens)


def _sizes(case: Case, stretch: Stretch) -> tuple[StepSizes, int]:
    """Returns the sizes of the largest step, with a cache as ``load_engine`` makes it, or as large
    as the sequences take; and how many tokens the latter are, else 0."""
    wanted, decoder, engine = case.wanted, case.subject.decoder, case.wanted.engine
    kv_tokens, each = 0, -(-wanted.positions // PAGE)
    if engine is None:
        pages, slots = each * 4 * wanted.batch, 2 * wanted.batch
        longest, sequences = wanted.positions, max(1, wanted.batch)

        def own(pages: int) -> int:
            step, device = wanted.step_tokens, case.execution.device
            return window_pages(decoder, pages, sequences, step, device)

        pool: Callable[[int], int] = own
    else:
        longest = engine.max_model_len or min(CONTEXT, case.subject.positions)
        sequences, slots = engine.max_num_seqs, engine.state_slots
        cost = cost_of(case.execution, engine, decoder).times(stretch.factor)
        states = round(decoder.state_bytes * stretch.factor) * slots
        if case.execution.on_gpu and case.machine.gpu is not None:
            most = _gpu_gib(case, case.machine.gpu) * len(gpus_of(case.execution.device))
            share = (int(most * GIB) - states) // 4
        else:
            has = int(case.machine.cpu.memory_gib * ROOM * GIB)
            share = (has - states - stretch.all_weights) // 8
        pages, pool = pages_of(engine, longest, cost, max(0, share)), cost.pool
        if (enough := each * wanted.batch + 1) > pages and not wanted.pages:
            pages, kv_tokens = enough, enough * PAGE
    pages = wanted.pages or pages
    counts = pages, slots, pool(pages)
    pages, slots, windowed = (math.ceil(n * stretch.factor) for n in counts)
    step = largest_step(
        longest,
        pages,
        wanted.step_tokens,
        sequences,
        state_slots=slots,
        window_pages=windowed,
    )
    return step, kv_tokens


def _gpu_gib(case: Case, gpu: Gpu) -> float:
    return min(gpu.memory_gib, case.execution.gpu_gib or gpu.memory_gib)


def _on_gpus(case: Case, gpus: list[str], sizes: StepSizes, has: int, stretch: Stretch) -> Placed:
    from pykernels.gpu.limits import SUM_BLOCK, SUM_MEMBERS, SUM_PROGRAMS

    from ..pinning.hybrid import with_slots_that_fit

    gpu, decoder = case.machine.gpu, case.subject.decoder
    assert gpu is not None
    run = case.execution
    free = dict.fromkeys(gpus, int(_gpu_gib(case, gpu) * GIB) - HEADROOM)
    peers = len(gpus) <= SUM_MEMBERS and gpu.peer_gbps is not None
    one_shot = SUM_PROGRAMS * SUM_BLOCK if peers else 0
    every = GpuMachine(free, stretch.layouts, one_shot=one_shot)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        largest = sizes.of(sizes.tokens or max(STEP_TOKENS, sizes.sequences))
        machine = layer_gpus(run.gpus, run.prefill, every, decoder, largest, run.experts)
        placement = place_on(machine, decoder, largest, run.experts)
        how = run.kv_gpu_gib, run.dense_gib, run.prefill
        if run.gpus != TENSOR or how[:2] != ("auto", "auto"):  # each GPU has a part of a layer
            plan = ExecutionPlan(largest, placement)
            placement = fitted(decoder, machine, plan, *how).placement
        if placement.kv_in_main and sizes.window_pages:  # pages that cross are of all layers
            return _on_gpus(case, gpus, replace(sizes, window_pages=0), has, stretch)
        if run.kv_attention == "auto":
            run = replace(run, kv_attention=_faster(case, decoder.lower(), gpu))
        plan = plan_on_gpus(run, decoder, every, case.wanted.positions, sizes, placement)
        if plan.chooses_deferral:
            wanted = case.wanted
            load = deferral_load(run, case.subject.positions, wanted.context, wanted.batch)
            load = replace(load, routing=wanted.routing)
            plan = with_deferral(plan, decoder, case.machine, load)
        room = 0
        if plan.placement.experts == CPU:
            room = min(free_for_experts(decoder, machine, plan).values())
        if run.slots and not case.slots and plan.placement.experts == CPU:
            fits = with_slots_that_fit(run.slots, decoder, machine, plan, run.prefill)
            plan = replace(plan, placement=fits)
            counts = [each.slots for each in fits.filled(Filled.BETWEEN_STEPS).values()]
            case = replace(case, slots=min(counts, default=0))
        elif case.slots:
            plan = _with_slots(case, plan)
    compiled = compile(decoder, plan, Phase.PROMPT, plan.sizes.tokens)
    caches = decoder.caches(*plan.sizes.of_caches)
    program = decoder.lower()
    crossing = plan.placement.filled(Filled.EACH_STEP)
    memory = _of_gpus(every, compiled)
    for over in plan.routes.values():
        shared = replace(plan, stream_over=over)
        theirs = _of_gpus(every, compile(decoder, shared, Phase.STREAMED, plan.sizes.tokens))
        memory |= {name: own for name, own in theirs.items() if name not in memory}
    cpu = plan.placement.nbytes(program, CPU, stretch.nbytes)
    cpu += sum(record.nbytes for record in crossing.values())
    cache = bytes_in_main(compiled.program, caches)
    return Placed(case, plan, {**memory, CPU: Memory(has, cpu, cache, 0)}, max(0, room))


def _of_gpus(machine: GpuMachine, compiled: Compiled) -> dict[str, Memory]:
    """What the parts of a step on GPUs need."""
    steps, memory, size = step_bytes(machine, compiled), {}, machine.layouts.weight_bytes
    for name in steps:
        part, elsewhere = compiled.parts[name], host_caches(compiled.parts[name])
        there = (n for n, record in compiled.residency(name).items() if not record.crosses)
        cached = sum(
            math.prod(part.shape(key)) * buffer.dtype.itemsize
            for key, buffer in part.buffers.items()
            if buffer.kind == "cache" and key not in elsewhere
        )
        weights = sum(size(part.weights[each]) for each in there)
        memory[name] = Memory(machine.free[name], weights, cached, steps[name])
    return memory


def _faster(case: Case, program: Program, gpu: Gpu) -> str:
    """Where attention to keys and values in main memory takes less time: "cpu" or "gpu"."""
    cpu = case.machine.cpu
    node = next(node for node in program.nodes if node.op == "attention")
    one = work(program, 1, 1)[node.name]
    on_cpu = max(one.nbytes / cpu.read_gbps, one.flops / cpu.attention_tflops / 1e3)
    return CPU if on_cpu < one.nbytes / gpu.link_gbps else "gpu"


def _with_slots(case: Case, plan: ExecutionPlan) -> ExecutionPlan:
    """The plan with slots of each layer for experts that change from step to step."""
    layers = [each.experts.layer for each in moe_layers(case.subject.decoder.lower())]
    slots = {layer: case.slots for layer in layers if layer is not None}
    placement = plan.placement.with_slots(case.subject.decoder.lower(), slots)
    return replace(plan, placement=placement)
