"""The plan of a model on a machine with GPUs: a pure function of sizes, the machine and options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from pykernels.errors import PykernelsError

from ...passes.layers import check_routed
from ...program.sizes import StepSizes
from ..compile import compile
from ..config import ExecutionConfig
from ..execution import ExecutionPlan
from ..lowerable import Lowerable, Pass
from ..placement import CPU, Placement, place
from ..prompt_sizes import HOST_BUCKETS, PromptSizes
from ..residency import Filled
from . import kv
from .capacity import step_tokens
from .dense import described
from .machine import Machine
from .routes import TENSOR, check_tensor, layer_gpus, with_routes
from .stream_budget import wanted_streaming
from .with_rates import check_split, splits, with_rates

DECODE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512)
PROMPT_BUCKETS = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072)
"""Buckets of steps with chunks of prompts, experts on the GPU: a step computes at most half as much
again as it has tokens for, and experts nothing for padding."""
HALF = 0.5
"""Share of the experts that cross where no rates are known: in Triton's interpreter."""


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
    every = machine
    if placement is None:
        machine = layer_gpus(config.gpus, config.prefill, machine, model, sizes, config.experts)
        placement = place_on(machine, model, sizes, config.experts)
    elif not placement.by_layer and config.gpus != TENSOR:
        machine = machine.only(placement.device)
    tensor = tuple(every.free) if config.gpus == TENSOR else ()
    if tensor:
        machine = every
        check_tensor(model, config, placement)
    on_cpu = placement.experts == CPU
    if config.dual_batch is True and not on_cpu:
        check_routed(model.lower(), "dual_batch")
        raise PykernelsError(
            "dual_batch with the experts on the GPU: there is nothing beside which the other"
            " microbatch could run",
            "Keep the experts on the CPU (experts cpu), or leave dual_batch off",
        )
    attends = config.kv_attention == CPU and bool(placement.kv_in_main)
    if config.dual_batch is True and attends:
        raise PykernelsError(
            "dual_batch with kv_attention cpu: a microbatch has no inputs on the CPU",
            "Leave one of them out",
        )
    chooses = config.defer_load is not None and on_cpu
    plan = ExecutionPlan(
        sizes,
        placement,
        # What is deferred takes memory; of how many experts it is makes no difference.
        config.deferred or int(chooses),
        on_cpu and bool(config.dual_batch) and not attends,
        nodes=model.store.nodes,
        passes=tuple(passes),
        max_model_len=max_model_len,
        kernel=config.kernel,
        prefill=config.prefill,
        tensor=tensor,
        one_shot=machine.one_shot if tensor else 0,
        buckets=HOST_BUCKETS if on_cpu else PROMPT_BUCKETS,
        decode_buckets=DECODE_BUCKETS,
        policy=config.cache_policy,
        kv_attention=CPU if config.kv_attention == CPU else "gpu",
        measures_kv=config.kv_attention == "auto" and kv.chooses(model, placement, machine),
        gpu_gib=config.gpu_gib,
    )
    tokens = sizes.tokens
    streaming = wanted_streaming(config.prefill, model, machine, plan, tokens or None)
    if not tokens:
        tokens = streaming.tokens if streaming else step_tokens(model, machine, plan)
    plan = replace(
        plan,
        sizes=sizes.of(max(tokens, sizes.sequences)),
        streaming=streaming,
        deferred=config.deferred,
        chooses_deferral=chooses,
        measures_kv=plan.measures_kv and not plan.dual_batch,
        decisions=_decisions(model, plan),
    )
    if tensor:
        said = f"gpus: {', '.join(tensor)} have a part of the heads and experts of each layer"
        return replace(plan, decisions=(*plan.decisions, said))
    if len(every.free) > len(machine.free):
        plan = with_routes(config.gpus, model, every, plan, config.shares)
    if config.shares and not plan.routes:
        raise PykernelsError(
            f"gpu_shares {config.gpu_shares}: {config.device} share no prompt",
            "Leave gpu_shares at auto, or give gpus dslp, which says why where they cannot",
        )
    if streaming is None:
        return plan
    if machine.real:
        return replace(plan, measures_prompts=True)
    return _unmeasured(model, machine, plan)


def _decisions(model: Lowerable, plan: ExecutionPlan) -> tuple[str, ...]:
    crossing, layers = plan.placement.filled(Filled.EACH_STEP), plan.placement.kv_in_main
    lines = list[str]()
    program = compile(model, plan).program if crossing or layers else None
    if program is not None and layers:
        caches = model.caches(*plan.sizes.of_caches)
        lines.append(kv.described(layers, program, caches))
    if program is not None and crossing:
        lines.append(described(crossing, program))
    return tuple(lines)


def _unmeasured(model: Lowerable, machine: Machine, plan: ExecutionPlan) -> ExecutionPlan:
    """The plan with prompts by the way that was asked for, in Triton's interpreter."""
    most, may_split = plan.sizes.tokens, splits(machine, plan, compile(model, plan).program)
    check_split(plan, may_split)
    if plan.prefill == "split":
        return replace(plan, prompts=PromptSizes.split_only(most, lambda tokens: HALF))
    return with_rates(plan, None, may_split)


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
    parts = model.caches(*sizes.of_caches)
    caches = {name: part.nbytes for name, part in parts.items()}
    size = machine.layouts.weight_bytes
    return place(model.lower(), experts, machine.free, size, placed, caches, by_layer)
