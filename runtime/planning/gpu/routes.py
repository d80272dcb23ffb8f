"""How several GPUs share a model whose experts lie in main memory (OSDI'26 3.2, 3.3.2).

The first GPU decodes, with the CPU. Every GPU has dense weights and a cache of its own, so prompts
may be streamed to other GPUs than that one: a *route* is the GPUs that share such a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from pykernels.errors import PykernelsError

from ...passes.layers import moe_layers
from ...program.sizes import StepSizes
from ..compile import compile
from ..config import ExecutionConfig
from ..execution import ExecutionPlan, Phase
from ..lowerable import Lowerable
from ..placement import CPU, Placement, place
from ..residency import Filled
from .capacity import step_bytes
from .machine import Machine
from .shares import by_links, described

DSLP, DISAGGREGATED, ROUTED, TENSOR = "dslp", "disaggregated", "routed", "tensor"
SHARED = (DSLP, DISAGGREGATED, ROUTED, TENSOR)
"""Values of ``ExecutionConfig.gpus`` by which the first GPU has all layers."""
_NOTHING: Mapping[str, str] = MappingProxyType({})


def layer_gpus(
    gpus: str,
    prefill: str,
    machine: Machine,
    model: Lowerable,
    sizes: StepSizes,
    experts: str,
    placed: Mapping[str, str] = _NOTHING,
    by_layer: Mapping[int, str] | None = None,
) -> Machine:
    """The machine with the GPUs that have layers of a model: all, or the first one alone.

    Args:
        gpus, prefill, experts: of ``ExecutionConfig``; the others: as ``planning.placement.place``.

    Raises:
        PykernelsError: rules that place layers on several GPUs, and ``gpus`` shares them otherwise.
    """
    first = next(iter(machine.free))
    if len(machine.free) == 1 or gpus == "pipeline":
        return machine
    if by_layer:
        if gpus != "auto":
            raise PykernelsError(
                f"rules place layers on several GPUs, which gpus {gpus!r} shares otherwise",
                "Leave gpus at auto, or those rules out",
            )
        return machine
    if gpus in SHARED:
        return machine.only(first)
    streams = prefill == "stream" or (prefill == "auto" and machine.real)
    if model.states or not streams:
        return machine
    program, size = model.lower(), machine.layouts.weight_bytes
    caches = {n: c.nbytes for n, c in model.caches(*sizes.of_caches).items()}
    if place(program, experts, machine.free, size, placed, caches).experts != CPU:
        return machine
    alone = place(program, CPU, {first: machine.free[first]}, size, placed, caches)
    fits = all(alone.nbytes(program, first, size, caches) <= free for free in machine.free.values())
    return machine.only(first) if fits else machine


def check_tensor(model: Lowerable, config: ExecutionConfig, placement: Placement) -> None:
    """Raises PykernelsError for what GPUs cannot have a part of, each."""
    program = model.lower()
    faults = {
        "layers keep a state of each sequence": bool(model.states),
        "experts are on the CPU": placement.experts == CPU and bool(moe_layers(program)),
        "experts are deferred": config.defer not in (None, "off", 0, "0", "auto"),
        "dense weights cross in each step": bool(placement.filled(Filled.EACH_STEP)),
        "keys and values lie in main memory": bool(placement.kv_in_main),
    }
    for fault, is_there in faults.items():
        if is_there:
            raise PykernelsError(
                f"gpus 'tensor': {fault}",
                "Use --experts gpu without defer, dense_gib or kv_gpu_gib, or --gpus pipeline",
            )


def with_routes(
    gpus: str,
    model: Lowerable,
    machine: Machine,
    plan: ExecutionPlan,
    shares: Sequence[float] = (),
) -> ExecutionPlan:
    """The plan of the first GPU with the routes of its streamed steps.

    Args:
        gpus, shares: of ``ExecutionConfig``; ``machine``: with all GPUs.

    Raises:
        PykernelsError: what other GPUs cannot share, or have no memory for.
    """
    names = tuple(machine.free)
    wanted = ROUTED if gpus == "auto" else gpus
    if reason := _why_not(model, plan):
        if gpus != "auto":
            raise PykernelsError(f"gpus {gpus!r}: {reason[0]}", reason[1])
        return replace(
            plan, decisions=(*plan.decisions, f"{', '.join(names[1:])} idle: {reason[0]}")
        )
    routes = {DSLP: names, DISAGGREGATED: names[1:]}
    routes = {name: over for name, over in routes.items() if wanted in (name, ROUTED)}
    assert plan.streaming is not None
    dealt = dict(zip(names, shares, strict=True)) if shares else by_links(machine.links())
    plan = replace(plan, streaming=replace(plan.streaming, shares=dealt))
    _check_memory(model, machine, plan, routes)
    said = {
        DSLP: f"streamed prompts are shared by {', '.join(names)}",
        DISAGGREGATED: f"{names[0]} decodes, prompts are streamed to {', '.join(names[1:])}",
        ROUTED: f"prompts are streamed to {', '.join(names)} while nothing decodes, else to"
        f" {', '.join(names[1:])}",
    }
    line = f"gpus: {said[wanted]}" + (f"; {described(dealt)}" if dealt else "")
    return replace(plan, routes=routes, decisions=(*plan.decisions, line))


def _why_not(model: Lowerable, plan: ExecutionPlan) -> tuple[str, str] | None:
    """Why a plan's steps cannot be shared, as a clause, and a hint."""
    if model.states:
        return "layers keep a state of each sequence", "Use --gpus pipeline"
    if plan.streaming is None:
        return "no prompt is streamed", "Use --prefill stream, or --gpus pipeline"
    if plan.deferred or plan.chooses_deferral:
        return "experts are deferred", "Leave defer out, or use --gpus pipeline"
    if plan.placement.kv_in_main:
        hint = "Ask for fewer kv_tokens, or use --gpus pipeline"
        return "keys and values lie in main memory", hint
    if plan.placement.gpu_experts_of:
        return "the first GPU has some experts for good", "Leave gpu_experts out"
    if plan.placement.filled(Filled.EACH_STEP):
        return "dense weights cross in each step", "Leave dense_gib at auto, or use --gpus pipeline"
    return None


def _check_memory(
    model: Lowerable,
    machine: Machine,
    plan: ExecutionPlan,
    routes: Mapping[str, tuple[str, ...]],
) -> None:
    """Raises PykernelsError where a GPU has too little for dense weights, its cache and steps."""
    if not machine.real:
        return
    size = machine.layouts.weight_bytes
    sizes = plan.sizes
    caches = {n: c.nbytes for n, c in model.caches(*sizes.of_caches).items()}
    program = compile(model, plan).program
    for over in routes.values():
        compiled = compile(model, replace(plan, stream_over=over), Phase.STREAMED, sizes.tokens)
        steps = step_bytes(machine, compiled)
        for gpu in over:
            if gpu == plan.placement.device:
                continue
            alone = Placement(gpu, CPU)
            needed = alone.nbytes(program, gpu, size, caches) + steps[gpu]
            if needed > machine.free[gpu]:
                has, need = (n / 2**30 for n in (machine.free[gpu], needed))
                raise PykernelsError(
                    f"{gpu} has {has:.1f} GiB; dense weights, a KV cache and steps of"
                    f" {sizes.tokens} tokens of its own need {need:.1f}",
                    "Ask for fewer kv_tokens or max_num_batched_tokens, or use --gpus pipeline",
                )
