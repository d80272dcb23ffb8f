"""Measures on GPUs what a plan leaves open, and finishes it by that."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from pykernels.gpu.moe.from_tiles import ExpertTiles, copy_experts
from pykernels.quant.split import Experts

from ...planning.compile import compile
from ...planning.execution import ExecutionPlan, Phase
from ...planning.gpu.kv import with_attention
from ...planning.gpu.with_rates import (
    check_split,
    fits_split,
    splits,
    with_links,
    with_pinned,
    with_rates,
)
from ...planning.prefill_rates import Rates
from ...planning.streaming import Streaming
from ...program import Program
from ...program.weights import WeightStore
from ...runner.batch import StepBatch
from ...runner.measured.kept_rates import kept_rates
from ...runner.measured.kv_attention import context_of, decode_seconds
from ...runner.measured.prefill import measured_rates
from ..cpu import weights as cpu
from ..gpus import Gpus
from .layouts import machine_of
from .memory.pinning import pin_experts
from .resources import CudaResources
from .step.executable import CudaExecutable
from .step_runner import CudaStepRunner

_LINK_BYTES = 64 << 20
_ROUNDS = 3


def calibrated(resources: CudaResources, plan: ExecutionPlan, gpus: Gpus) -> ExecutionPlan:
    """The finished plan of an open one. Weights are there; what is allocated and pinned stays with
    ``resources``, but for the memory of the steps that are measured.

    Args:
        resources: of the GPUs that have layers; ``gpus``: all to which prompts are streamed.

    Raises:
        PykernelsError: experts that cannot cross as was asked for; no memory.
    """
    probe = Probe(resources, plan)
    try:
        if plan.measures_kv:
            plan = _with_kv_attention(plan, probe)
        return _with_prompts(resources, plan, probe, gpus) if plan.measures_prompts else plan
    finally:
        probe.close()


def _with_kv_attention(plan: ExecutionPlan, probe: Probe) -> ExecutionPlan:
    context = context_of(plan.max_model_len, plan.sizes.pages)
    ways = (replace(plan, kv_attention=where) for where in ("gpu", "cpu"))
    times = [probe.decode_seconds(way, context) for way in ways]
    return with_attention(plan, context, *times)


def _with_prompts(
    resources: CudaResources, plan: ExecutionPlan, probe: Probe, gpus: Gpus
) -> ExecutionPlan:
    assert plan.streaming is not None
    model, store = resources.model, resources.model.store
    program = compile(model, plan).program
    with torch.cuda.device(resources.device):
        pinned = pin_experts(plan.streaming, program, store, resources.pinned)
    plan = with_pinned(plan, program, *pinned)
    if plan.streaming is None:
        return plan
    crossing = plan.streaming
    links = {name: experts_rate(crossing, program, store, gpu) for name, gpu in gpus.items()}
    plan = with_links(plan, links)
    if plan.prefill == "stream":
        return with_rates(plan, None, False)
    may_split = probe.may_split(plan, program)
    check_split(plan, may_split)
    return with_rates(plan, probe.rates(plan, program, may_split), may_split)


class Probe(CudaStepRunner):
    """Steps of a plan that is not finished, to be measured. They write to the cache's first places,
    which nobody reads before they are written."""

    def __init__(self, resources: CudaResources, plan: ExecutionPlan) -> None:
        super().__init__(resources, plan)
        sizes = plan.sizes
        tables = np.zeros((sizes.sequences, sizes.table_pages), np.int64)
        windows = np.zeros_like(tables) if sizes.window_pages else None
        batch = StepBatch.allocate(sizes.tokens, sizes.sequences, sizes.logits, tables, windows)
        self._inputs: Mapping[str, torch.Tensor] = self.host_inputs(batch)

    def close(self) -> None:
        """Gives back the memory of the steps."""
        if self._step_builder is not None and self._resources.real:
            self._step_builder = None
            gc.collect()
            torch.cuda.empty_cache()

    def step(
        self, plan: ExecutionPlan, phase: Phase, tokens: int = 1, share: float = 0.0
    ) -> CudaExecutable:
        """One by a plan of the same sizes."""
        return self.make_step(compile(self.model, plan, phase, tokens, share), self._inputs)

    def decode_seconds(self, plan: ExecutionPlan, context: int) -> float:
        """Seconds of a one-token step with so many keys, by a plan of the same sizes."""
        return decode_seconds(self.step(plan, Phase.DECODE), self._inputs, self.sizes, context)

    def may_split(self, plan: ExecutionPlan, program: Program) -> bool:
        """Whether there are kernels for split steps, and memory beside that of streamed ones."""
        place = self._resources.gpus, self.weights, plan.gpu_gib
        machine = machine_of(*place)
        if not splits(machine, plan, program):
            return False
        self.prepare(self._inputs)
        machine = machine_of(*place)  # less than before the caches
        return fits_split(self.model, machine, plan, program)

    def rates(self, plan: ExecutionPlan, program: Program, may_split: bool) -> Rates:
        """What steps of prompts cost by each way, measured or kept from an earlier load."""
        assert plan.streaming is not None
        routes = plan.routes.values() or [()]
        stream_s = max(plan.streaming.seconds(program, over) for over in routes)
        longest = min(plan.sizes.tokens, plan.max_model_len)

        def step(tokens: int, share: float) -> CudaExecutable:
            return self.step(plan, Phase.SPLIT if share else Phase.PROMPT, tokens, share)

        measure = partial(
            measured_rates,
            step,
            self._inputs,
            self.sizes,
            longest,
            self.vocab_size,
            stream_s,
            may_split,
        )
        machine = self._resources.gpus.values(), self._resources.pool.threads, plan.kernel
        return kept_rates(program, *machine, (longest, may_split), stream_s, measure)


def experts_rate(
    streaming: Streaming, program: Program, store: WeightStore, device: torch.device
) -> float:
    """Bytes a second that copies of pinned experts bring from where they lie, in their pieces,
    while nothing else runs; ``link.link_rate`` is the link's own."""
    _, spec = next(streaming.experts(program))
    held: Experts = store.get(spec, cpu.CPU_DEVICE, cpu.packed)
    part = held.slices[0]
    count = min(part.shape.E, max(1, _LINK_BYTES // part.bytes_per_expert))
    tiles = ExpertTiles.empty(part.shape, part.fmt, part.down_fmt, count, device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.device(device):
        copy_experts(part, range(count), tiles)  # the first one wakes the link
        begin.record()
        for _ in range(_ROUNDS):
            copy_experts(part, range(count), tiles)
        end.record()
        end.synchronize()
    return _ROUNDS * tiles.nbytes / max(1e-9, begin.elapsed_time(end) / 1e3)
