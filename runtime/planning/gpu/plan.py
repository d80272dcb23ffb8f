"""The plan of a model on a machine with GPUs: a pure function of sizes, the machine and options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from pykernels.errors import PykernelsError

from ...passes.layers import check_routed
from ...program.sizes import StepSizes
from ..config import ExecutionConfig
from ..execution import ExecutionPlan
from ..lowerable import Lowerable, Pass
from ..placement import CPU, Placement, place
from .capacity import step_tokens
from .machine import Machine
from .stream_budget import wanted_streaming


def plan_on_gpus(
    config: ExecutionConfig,
    model: Lowerable,
    machine: Machine,
    max_model_len: int,
    sizes: StepSizes,
    placement: Placement | None = None,
    passes: Sequence[Pass] = (),
) -> ExecutionPlan:
    """The plan of a model on GPUs, its experts on the CPU where they do not fit.

    Args:
        sizes: of the largest step; of 0 tokens: as many as ``capacity.STEP_TOKENS`` says, or as
            streamed experts want.
        placement: of the model's nodes, where it is chosen already.

    Raises:
        PykernelsError: settings that exclude each other; experts that cannot be streamed as asked
            for.
    """
    placement = placement or place_on(machine, model, sizes, config.experts)
    if placement.slots and len(machine.free) > 1:
        raise PykernelsError(*several_refused("an expert cache"))
    on_cpu = placement.experts == CPU
    if config.dual_batch is True and not on_cpu:
        check_routed(model.lower(), "dual_batch")
        raise PykernelsError(
            "dual_batch with the experts on the GPU: there is nothing beside which the other"
            " lane could run",
            "Keep the experts on the CPU (experts cpu), or leave dual_batch off",
        )
    measured = config.defer == "auto" and on_cpu
    plan = ExecutionPlan(
        sizes,
        placement,
        # What is deferred takes memory; of how many experts it is makes no difference.
        config.deferred or int(measured),
        on_cpu and bool(config.dual_batch),
        nodes=model.store.nodes,
        passes=tuple(passes),
        max_model_len=max_model_len,
        kernel=config.kernel,
        prefill=config.prefill,
        policy=config.cache_policy,
    )
    tokens = sizes.tokens
    streaming = wanted_streaming(config.prefill, model, machine, plan, tokens or None)
    if not tokens:
        tokens = streaming.tokens if streaming else step_tokens(model, machine, plan)
    return replace(
        plan,
        sizes=sizes.of(max(tokens, sizes.sequences)),
        streaming=streaming,
        deferred=config.deferred,
        measures_deferral=measured,
    )


def place_on(
    machine: Machine,
    model: Lowerable,
    sizes: StepSizes,
    experts: str,
    placed: Mapping[str, str] = MappingProxyType({}),
    by_layer: Mapping[int, str] | None = None,
) -> Placement:
    """Where a model's nodes run beside a cache of these sizes: unless they fit, routed experts on
    the CPU, all else on GPUs. The other arguments: see ``placement.place``."""
    parts = model.caches(sizes.pages, sizes.state_slots)
    caches = {name: part.nbytes for name, part in parts.items()}
    size = machine.layouts.weight_bytes
    return place(model.lower(), experts, machine.free, size, placed, caches, by_layer)


def several_refused(what: str) -> tuple[str, str]:
    """The error of what only one GPU can do yet."""
    return f"{what} on several GPUs is not there yet", "Name one GPU, or leave it out"
