"""Which experts the engine has on a GPU beside those of the CPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from pykernels.errors import PykernelsError
from runtime.devices.cuda.layouts import machine_of
from runtime.devices.cuda.memory.weights import gpu_bytes
from runtime.devices.gpus import gpus_of
from runtime.passes.layers import check_routed, moe_layers
from runtime.planning.execution import ExecutionPlan
from runtime.planning.gpu.capacity import free_for_experts
from runtime.planning.gpu.fit import fitted
from runtime.planning.gpu.machine import Machine
from runtime.planning.gpu.plan import place_on
from runtime.planning.gpu.routes import TENSOR, layer_gpus
from runtime.planning.gpu.stream_budget import streaming_bytes
from runtime.planning.lowerable import Lowerable
from runtime.planning.placement import CPU, Placement
from runtime.program import Program
from runtime.program.sizes import StepSizes
from runtime.program.weight_spec import WeightSpec

from .choose import Block, choose
from .profile import Profile


def place_hybrid(
    asked: int | str | Profile | None,
    model: Lowerable,
    device: str,
    sizes: StepSizes,
    experts: str,
    placed: Mapping[str, str] = MappingProxyType({}),
    by_layer: Mapping[int, str] | None = None,
    cache: int | str = 0,
    prefill: str = "cpu",
    dense: float | str = "auto",
    kv: float | str = "auto",
    gpu_gib: float | None = None,
    gpus: str = "auto",
) -> Placement:
    """Places a model (``place_on``), and decides which keys, values and dense weights cross to the
    GPUs in each step (``fit``), and which experts these have besides, or how many expert slots.

    Args:
        asked: see ``choose``; None or 0: none.
        device: one GPU or several, as ``gpus_of`` reads them.
        sizes: of the largest step.
        experts: "auto", "cpu" or "gpu"; "auto" with a number or a profile is "cpu".
        placed, by_layer: as ``placement.place``.
        cache: slots of each layer, "auto": as many as fit, or 0.
        prefill, dense, gpus, gpu_gib: see ``ExecutionConfig``; ``kv``: its ``kv_gpu_gib``.

    Raises:
        PykernelsError: see ``gpu_experts_of``; some experts, or expert slots, though all are there;
            experts that stay and an expert cache; more than ``gpu_gib``.
    """
    for option, wanted in (("gpu_experts", asked), ("expert_cache", cache)):
        if wanted and wanted != "auto":
            check_routed(model.lower(), option)
    machine = machine_of(gpus_of(device), model.store, gpu_gib)
    machine = layer_gpus(gpus, prefill, machine, model, sizes, experts, placed, by_layer)

    def plan_with(experts: str) -> ExecutionPlan:
        placement = place_on(machine, model, sizes, experts, placed, by_layer)
        plan = ExecutionPlan(sizes, placement)
        if gpus == TENSOR and (kv, dense) == ("auto", "auto"):  # each GPU has a part of a layer
            return plan
        return fitted(model, machine, plan, kv, dense, prefill)

    if cache:
        if asked:
            raise PykernelsError(
                "an expert cache beside gpu_experts, which keep their places on the GPU",
                "Give one of both; the cache finds the most used ones by itself",
            )
        return _place_expert_slots(cache, model, machine, experts, plan_with, prefill)
    if not asked:
        return plan_with(experts).placement
    if experts == "gpu":
        raise PykernelsError("some experts on the GPU beside all of them", "Give one of both")
    plan = plan_with(experts if asked == "auto" else CPU)
    placement = plan.placement
    if placement.experts != CPU:  # all fit
        return placement
    free = free_for_experts(model, machine, plan)
    program = model.lower(sizes)
    return placement.with_experts(program, gpu_experts_of(asked, program, placement, free))


def _place_expert_slots(
    cache: int | str,
    model: Lowerable,
    machine: Machine,
    experts: str,
    plan_with: Callable[[str], ExecutionPlan],
    prefill: str,
) -> Placement:
    if experts == "gpu":
        raise PykernelsError(
            "an expert cache with all experts on the GPU", "Leave it out, or use experts cpu"
        )
    plan = plan_with(experts if cache == "auto" else CPU)
    if plan.placement.experts != CPU:  # all fit
        return plan.placement
    return with_slots_that_fit(cache, model, machine, plan, prefill)


def with_slots_that_fit(
    cache: int | str, model: Lowerable, machine: Machine, plan: ExecutionPlan, prefill: str
) -> Placement:
    """A plan's placement with slots of each layer beside all else that a GPU has, and beside
    streamed prompts where these may be.

    Args:
        cache: slots of each layer, or "auto": as many as fit.
        plan: experts on the CPU.

    Raises:
        PykernelsError: more than fit; as ``gpu_experts_of``.
    """
    program, placement = model.lower(plan.sizes), plan.placement
    free_bytes = free_for_experts(model, machine, plan)
    filling = dict.fromkeys(free_bytes, 0)
    for layer in moe_layers(program):
        spec, gpu = program.weight(layer.experts, "experts"), placement.gpu_of(layer.experts)
        filling[gpu] = max(filling[gpu], machine.layouts.filling_bytes(spec))
    streamed = dict.fromkeys(free_bytes, 0)
    if prefill in ("split", "stream") or (prefill == "auto" and cache == "auto"):
        streamed = streaming_bytes(model, machine, plan)
    free_bytes = {gpu: n - filling[gpu] - streamed[gpu] for gpu, n in free_bytes.items()}
    size = machine.layouts.weight_bytes
    expert_ids = gpu_experts_of(cache, program, placement, free_bytes, "expert_cache", size)
    return _with_slots(placement, program, expert_ids)


def with_slots(placement: Placement, model: Lowerable, cache: int | str) -> Placement:
    """The placement with slots of each layer on its device, which has room for any number of them.
    Raises as ``choose``."""
    program = model.lower()
    free_bytes = dict.fromkeys((placement.device, *placement.by_layer.values()), 1 << 62)
    chosen = gpu_experts_of(cache, program, placement, free_bytes, "expert_cache")
    return _with_slots(placement, program, chosen)


def _with_slots(
    placement: Placement, program: Program, chosen: Mapping[int, Sequence[int]]
) -> Placement:
    return placement.with_slots(program, {layer: len(own) for layer, own in chosen.items()})


def gpu_experts_of(
    asked: int | str | Profile,
    program: Program,
    placement: Placement,
    free_bytes: Mapping[str, int],
    option: str = "gpu_experts",
    size: Callable[[WeightSpec], int] = gpu_bytes,
) -> dict[int, tuple[int, ...]]:
    """Chooses the experts that each layer's GPU is to have; layers without any are left out.

    Args:
        asked: see ``choose``.
        program: any of the model's; no weight is read.
        placement: of its layers.
        free_bytes: bytes of each GPU that they may take; ``option``: that asked for them.
        size: bytes of experts on a GPU.

    Raises:
        PykernelsError: no routed experts, or none that a GPU computes alike; as ``choose``.
    """
    check_routed(program, option)
    layers, blocks = dict[str, int](), dict[str, Block]()
    for layer in moe_layers(program):
        node = layer.experts
        if (activations := node.attr("activations")) != "bf16":
            raise PykernelsError(
                f"{node.name} has {activations} activations, which the GPU's kernels do not take",
                f"Take activations out of the rule, or leave out {option}",
            )
        spec = program.weight(node, "experts")
        name = _block(spec.name)
        assert node.layer is not None
        layers[name] = node.layer
        blocks[name] = Block(spec.shape[0], size(spec.some([0])), placement.gpu_of(node))
    if isinstance(asked, Profile):
        counts = {_block(name): row for name, row in asked.counts.items()}
        asked = asked.model_copy(update={"counts": counts})
    chosen = choose(asked, blocks, free_bytes)
    if asked and not any(chosen.values()):
        warnings.warn(
            f"{', '.join(free_bytes)}: no room for experts beside the rest,"
            " all of them are on the CPU",
            stacklevel=3,
        )
    return {layers[name]: tuple(experts) for name, experts in chosen.items() if experts}


def _block(name: str) -> str:
    """The name of a layer's MLP, of that of its experts."""
    return name.removesuffix(".experts")
