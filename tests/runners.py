"""Runners of all devices by their sizes in a row, for tests that make one by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from runtime.devices.cpu.runner import CpuRunner
from runtime.devices.gpus import gpus_of
from runtime.devices.ref.runner import RefRunner
from runtime.devices.sim.deferral import deferral_load, with_deferral
from runtime.devices.sim.machine import OTHER, Cpu, Gpu, Kernel, Machine
from runtime.experts.cache import CachePolicy
from runtime.machine.nodes import ONE_NODE
from runtime.make_runner import make_plan
from runtime.planning.config import ExecutionConfig
from runtime.planning.execution import largest_step
from runtime.planning.lowerable import Pass
from runtime.planning.placement import Placement
from runtime.planning.residency import Residency
from runtime.runner.expert_slots import ExpertSlots
from runtime.workers.pool import WorkerPool

RATES = Machine(
    "a CPU beside a GPU that keeps it waiting",
    Cpu(4, 8, 0.02, {OTHER: Kernel(1.0)}, 1.0, 1.0),
    Gpu("a slow one", 8, 100.0, {OTHER: Kernel(1.0)}, 1.0, 10.0, launch_us=100.0),
)
"""By which "auto" defers experts."""


def cpu_runner(
    model: Any,
    pool: WorkerPool,
    max_model_len: int,
    num_pages: int | None = None,
    max_num_batched_tokens: int = 512,
    max_num_seqs: int = 16,
    kernel: str = "auto",
    passes: Sequence[Pass] = (),
    max_num_logits: int | None = None,
    deferred: int = 0,
) -> CpuRunner:
    sizes = largest_step(
        max_model_len, num_pages, max_num_batched_tokens, max_num_seqs, max_num_logits
    )
    config = ExecutionConfig(kernel=kernel, defer=deferred)
    plan = make_plan(config, model, max_model_len, sizes, passes=passes)
    return CpuRunner(model, replace(plan, nodes=pool.memory), pool)


def ref_runner(
    model: Any,
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
) -> RefRunner:
    sizes = largest_step(
        max_model_len, num_pages, max_num_batched_tokens, max_num_seqs, max_num_logits
    )
    config = ExecutionConfig("ref", defer=deferred, dual_batch=dual_batch, prefill=prefill)
    placement = Placement("ref", "cpu" if config.experts == "cpu" else "ref")
    placement = placement.with_slots(model.lower(), slots or {})
    plan = make_plan(config, model, max_model_len, sizes, placement, passes)
    nodes = ONE_NODE if pool is None else pool.memory
    return RefRunner(model, replace(plan, policy=policy, nodes=nodes), pool)


@dataclass(frozen=True)
class CudaOptions:
    """What ``cuda_runner`` is asked for: options of a plan, and fields of its placement."""

    experts: str = "auto"
    deferred: int | None = 0
    dual_batch: bool | str = False
    placed: Mapping[str, str] = field(default_factory=dict)
    gpu_experts: Mapping[int, Sequence[int]] | None = None
    by_layer: Mapping[int, str] | None = None
    prefill: str = "cpu"
    slots: Mapping[int, int] | None = None
    policy: CachePolicy | None = None
    crossing: Mapping[str, Residency] = field(default_factory=dict)
    buckets: tuple[int, ...] | None = None
    decode_buckets: tuple[int, ...] | None = None
    kv_in_main: tuple[int, ...] = ()
    kv_attention: str = "gpu"
    gpus: str = "pipeline"
    gpu_shares: str = "auto"
    window_pages: int = 0


def cuda_runner(
    model: Any,
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
) -> Any:
    """A ``CudaRunner`` by a finished plan; see ``gpus_of`` for its device."""
    from runtime.devices.cuda.layouts import machine_of
    from runtime.devices.cuda.resources import CudaResources
    from runtime.devices.cuda.runner import CudaRunner
    from runtime.planning.gpu.plan import place_on, plan_on_gpus

    sizes = largest_step(
        max_model_len, num_pages, max_num_batched_tokens, max_num_seqs, max_num_logits
    )
    sizes = replace(sizes, window_pages=options.window_pages)
    machine = machine_of(gpus_of(device), model.store)
    first, *others = machine.free
    has_layers = machine if options.gpus == "pipeline" else machine.only(first)
    dealt = options.placed, options.by_layer
    placement = place_on(has_layers, model, sizes, options.experts, *dealt)
    program = model.lower()
    placement = placement.with_experts(program, options.gpu_experts or {})
    placement = placement.with_slots(program, options.slots or {})
    placement = placement.with_residency(options.crossing)
    placement = replace(placement, kv_in_main=options.kv_in_main)
    config = ExecutionConfig(
        "cuda:0,cuda:1" if others else "cuda:0",
        gpus=options.gpus if others else "auto",
        gpu_shares=options.gpu_shares,
        experts=options.experts,
        defer="auto" if options.deferred is None else options.deferred,
        dual_batch=options.dual_batch,
        prefill=options.prefill,
        kernel=kernel,
        kv_attention=options.kv_attention,
    )
    plan = plan_on_gpus(config, model, machine, max_model_len, sizes, placement, passes)
    if plan.chooses_deferral:
        plan = with_deferral(plan, model, RATES, deferral_load(config, max_model_len))
    plan = replace(
        plan,
        policy=options.policy,
        nodes=pool.memory,
        buckets=options.buckets or plan.buckets,
        decode_buckets=options.decode_buckets or plan.decode_buckets,
    )
    runner = CudaRunner(CudaResources.open(model, plan, device, pool), plan)
    if plan.is_open:
        runner.load()
    return runner.finished()


def wait_for_slots(runner: Any) -> None:
    """From now on a step begins when all experts that are on their way are in their slots: it does
    not depend on a copy's time which step reads which."""
    update = runner.update_expert_slots

    def patient(slots: ExpertSlots) -> None:
        update(slots)
        while slots.cache.in_flight:
            update(slots)

    runner.update_expert_slots = patient
