"""From a configuration to the plan of a model on its device, and to what runs the plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from .devices.cpu.runner import CpuRunner
from .devices.ref.runner import RefRunner
from .devices.sim.deferral import deferral_load, with_deferral
from .devices.sim.machine import Machine
from .engine.scheduling.config import STEP_TOKENS
from .passes.on_ref import REF
from .passes.stream_weights import StreamRing
from .planning.config import ExecutionConfig
from .planning.execution import ExecutionPlan
from .planning.lowerable import Lowerable, Pass
from .planning.placement import CPU, Placement
from .planning.streaming import Streaming
from .program.sizes import StepSizes
from .runner.paged_runner import PagedRunner
from .workers.pool import WorkerPool


def make_plan(
    config: ExecutionConfig,
    model: Lowerable,
    max_model_len: int,
    sizes: StepSizes,
    placement: Placement | None = None,
    passes: Sequence[Pass] = (),
    rates: Callable[[], Machine] | None = None,
) -> ExecutionPlan:
    """How a model runs on the device that a configuration names.

    Args:
        max_model_len: positions that the model was made for, or fewer.
        sizes: see ``largest_step``; of 0 tokens: as many as pay on the device.
        placement: of the model's nodes and weights; None: as ``config`` has them.
        passes: of the user, for the programs of decode steps.
        rates: the machine's, by which "auto" defers experts; None: the plan leaves that open.

    Raises:
        PykernelsError: what the device cannot do.
    """
    if config.on_gpu:
        from .devices.cuda.layouts import machine_of
        from .devices.gpus import gpus_of
        from .planning.gpu.plan import plan_on_gpus

        machine = machine_of(gpus_of(config.device), model.store, config.gpu_gib)
        plan = plan_on_gpus(config, model, machine, max_model_len, sizes, placement, passes)
        if not plan.chooses_deferral or rates is None:
            return plan
        return with_deferral(plan, model, rates(), deferral_load(config, max_model_len))
    if not sizes.tokens:
        sizes = sizes.of(max(STEP_TOKENS, sizes.sequences))
    plan = ExecutionPlan(
        sizes,
        deferred=config.deferred,
        nodes=model.store.nodes,
        passes=tuple(passes),
        max_model_len=max_model_len,
        kernel=config.kernel,
        policy=config.cache_policy,
    )
    if config.device != REF:
        return plan
    streams = config.prefill == "stream"
    return replace(
        plan,
        placement=placement or Placement(REF, CPU if config.experts == CPU else REF),
        dual_batch=config.dual_batch is True,
        streaming=Streaming(StreamRing(), sizes.tokens, model.store.nodes) if streams else None,
    )


def make_runner(
    plan: ExecutionPlan, device: str, model: Lowerable, pool: WorkerPool
) -> PagedRunner:
    """What runs a model by a plan that was made for the device. Load it, then take the one that is
    ``finished``.

    Raises:
        PykernelsError: what the device cannot do, or has no memory for.
    """
    if device == CPU:
        return CpuRunner(model, plan, pool)
    if device == REF:
        return RefRunner(model, plan, pool)
    from .devices.cuda.resources import CudaResources
    from .devices.cuda.runner import CudaRunner

    return CudaRunner(CudaResources.open(model, plan, device, pool), plan)
