"""From a device's name to the plan of a model there, and to what runs it."""

from __future__ import annotations

from .devices.cpu.runner import CpuRunner
from .devices.ref.runner import RefRunner
from .passes.on_ref import REF
from .passes.stream_weights import Ring
from .planning.execution import ExecutionPlan
from .planning.lowerable import Lowerable
from .planning.options import PlanOptions
from .planning.placement import CPU, Placement
from .planning.streaming import Streaming
from .program.sizes import StepSizes
from .runner.paged_runner import PagedRunner
from .workers.pool import WorkerPool

STEP_TOKENS = 512
"""The token budget of a step on the CPU and on the ref device, if nobody says."""


def make_plan(
    model: Lowerable,
    device: str,
    max_model_len: int,
    sizes: StepSizes,
    options: PlanOptions = PlanOptions(),  # noqa: B008 - frozen
) -> ExecutionPlan:
    """How a model runs on a device.

    Args:
        device: "cpu", "ref", or GPUs as ``gpus_of`` reads them.
        max_model_len: positions that the model was made for, or fewer.
        sizes: see ``largest_step``; of 0 tokens: as many as pay on the device.

    Raises:
        PykernelsError: no such device, or what it cannot do.
    """
    if device not in (CPU, REF):
        from .devices.cuda.layouts import machine_of
        from .devices.gpus import check_device, gpus_of
        from .planning.gpu.plan import plan_on_gpus

        check_device(device)
        machine = machine_of(gpus_of(device), model.store)
        return plan_on_gpus(model, machine, max_model_len, sizes, options)
    if not sizes.tokens:
        sizes = sizes.of(max(STEP_TOKENS, sizes.sequences))
    on_ref, streams = device == REF, options.prefill == "stream"
    return ExecutionPlan(
        sizes,
        options.placement or Placement(device, CPU if options.experts == CPU else device),
        options.deferred or 0,
        on_ref and options.dual_batch is True,
        Streaming(Ring(), sizes.tokens, model.store.nodes) if on_ref and streams else None,
        passes=tuple(options.passes),
        max_model_len=max_model_len,
        kernel=options.kernel,
        policy=options.policy,
    )


def make_runner(
    model: Lowerable, plan: ExecutionPlan, device: str, pool: WorkerPool
) -> PagedRunner:
    """What runs a model by a plan that was made for the device.

    Raises:
        PykernelsError: what the device cannot do, or has no memory for.
    """
    if device == CPU:
        return CpuRunner(model, plan, pool)
    if device == REF:
        return RefRunner(model, plan, pool)
    from .devices.cuda.runner import CudaRunner

    return CudaRunner(model, plan, device, pool)
