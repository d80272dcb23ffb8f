"""Which layers' keys and values stay on a GPU, and which lie in main memory and cross in each step
(``passes.gpu.offload_kv``)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from math import prod
from types import MappingProxyType

from ...kv_cache.layout import CachePart, cache_inputs
from ...passes.gpu.attend_on_cpu import attend_on_cpu
from ...passes.gpu.offload_kv import host_caches
from ...passes.stream_dense import STAGING_BUFFERS
from ...program import Program
from ..compile import compile
from ..execution import ExecutionPlan, Phase
from ..lowerable import Lowerable
from ..placement import CPU, Placement
from .capacity import STEP_TOKENS, free_for_steps, step_bytes
from .dense import crossing_layers, spread
from .machine import Machine


def layers_in_main(
    model: Lowerable,
    machine: Machine,
    plan: ExecutionPlan,
    asked: float | str,
    tokens: int | None = None,
    reserved: Mapping[str, int] = MappingProxyType({}),
) -> tuple[int, ...]:
    """Numbers of the layers whose keys and values lie in main memory: as few as can be.

    Args:
        machine: in Triton's interpreter there is always room, unless it is capped.
        plan: in which none do yet.
        asked: ``ExecutionConfig.kv_gpu_gib``.
        tokens: budget of a step; None: the fewest of ``STEP_TOKENS``.
        reserved: bytes of each GPU that something else is to have if caches can make room for it.
    """
    T = tokens or STEP_TOKENS[-1]
    parts = compile(model, plan, Phase.PROMPT, T).parts
    layers = {gpu: cached_layers(parts[gpu]) for gpu in machine.free}
    attends = (node for part in parts.values() for node in part.nodes if node.op == "attention")
    windowed = {node.layer for node in attends if node.layer is not None and node.attr("window")}
    if asked != "auto":
        return _chosen(layers, dict.fromkeys(layers, round(float(asked) * 2**30)), windowed)
    if not machine.bounded:
        return ()
    free = _free(model, machine, plan, T)
    budgets = dict[str, int]()
    for gpu, sizes in layers.items():
        more, room = reserved.get(gpu, 0), sum(sizes.values()) + free[gpu]
        least = STAGING_BUFFERS * max(sizes.values(), default=0)
        budgets[gpu] = room - (more if room - more >= least else 0)
    found = _chosen(layers, budgets, windowed)
    if found:  # staging buffers are a little more than what lies in them
        left = _free(model, machine, with_kv_in_main(plan, found), T)
        short = {gpu: min(0, n - reserved.get(gpu, 0)) for gpu, n in left.items()}
        most = {gpu: max(sizes.values(), default=0) for gpu, sizes in layers.items()}
        few = {
            gpu: n + (short[gpu] if -short[gpu] < most[gpu] else 0) for gpu, n in budgets.items()
        }
        found = _chosen(layers, few, windowed)
    return found


def with_kv_in_main(plan: ExecutionPlan, layers: tuple[int, ...]) -> ExecutionPlan:
    """The plan with the keys and values of these layers in main memory."""
    return replace(plan, placement=replace(plan.placement, kv_in_main=layers))


def _chosen(
    layers: Mapping[str, Mapping[int, int]], budgets: Mapping[str, int], windowed: Collection[int]
) -> tuple[int, ...]:
    found = list[int]()
    for gpu, sizes in layers.items():
        found += _leaving(sizes, windowed, budgets[gpu])
    return tuple(sorted(found))


def _leaving(sizes: Mapping[int, int], windowed: Collection[int], budget: int) -> list[int]:
    """The layers whose caches leave a GPU. Those with windows go first: a step reads the last pages
    of them alone."""
    light = {layer: nbytes for layer, nbytes in sizes.items() if layer in windowed}
    other = {layer: nbytes for layer, nbytes in sizes.items() if layer not in windowed}
    if not light or sum(sizes.values()) <= budget:
        return _spread(sizes, budget)
    few = _spread(light, budget - sum(other.values()))
    staying = sum(nbytes for layer, nbytes in sizes.items() if layer not in few)
    staging = STAGING_BUFFERS * max(sizes.values())
    if staying + staging <= budget:
        return few
    numbers = list(other)  # all of those go, and of these some, in the same buffers
    for count in range(1, len(other)):
        leaving = [numbers[i] for i in spread(len(other), count)]
        if sum(other.values()) - sum(other[layer] for layer in leaving) + staging <= budget:
            return [*light, *leaving]
    return list(sizes)


def _spread(sizes: Mapping[int, int], budget: int) -> list[int]:
    numbers = list(sizes)
    return [numbers[i] for i in crossing_layers(list(sizes.values()), budget)]


def _free(model: Lowerable, machine: Machine, plan: ExecutionPlan, T: int) -> dict[str, int]:
    """Bytes of each GPU that are left beside all else."""
    steps = step_bytes(machine, compile(model, plan, Phase.PROMPT, T))
    return {gpu: n - steps[gpu] for gpu, n in free_for_steps(model, machine, plan).items()}


def cached_layers(part: Program) -> dict[int, int]:
    """Bytes of keys and values of each layer of a GPU's part."""
    layers: dict[int, dict[str, int]] = {}
    for node in part.nodes:
        if node.layer is not None:
            for name in cache_inputs(node).values():
                nbytes = prod(part.shape(name)) * part.buffers[name].dtype.itemsize
                layers.setdefault(node.layer, {})[name] = nbytes
    return {layer: sum(names.values()) for layer, names in layers.items()}


def bytes_in_main(program: Program, caches: Mapping[str, CachePart]) -> int:
    """Bytes of main memory that a model's caches take beside its GPUs.

    Args:
        program: any of the model's; ``caches``: all of them, by name.
    """
    here = host_caches(program)
    return sum(cache.nbytes for name, cache in caches.items() if name in here)


def chooses(model: Lowerable, placement: Placement, machine: Machine) -> bool:
    """Whether decode steps may attend to keys and values in main memory on the CPU or on the
    GPU, which is to be measured."""
    if not placement.kv_in_main or not machine.real:
        return False
    program = placement.place(model.lower())
    return attend_on_cpu(program, placement.kv_in_main) is not program


def with_attention(plan: ExecutionPlan, context: int, gpu_s: float, cpu_s: float) -> ExecutionPlan:
    """The plan that attends where it takes less time.

    Args:
        context: of a decode step that took ``gpu_s`` with keys and values that crossed, ``cpu_s``
            with attention on the CPU.
    """
    where = CPU if cpu_s < gpu_s else "gpu"
    told = (
        f"decode steps attend to what lies in main memory on the {where.upper()}: at a context"
        f" of {context} a step takes {1e3 * cpu_s:.1f} ms on the CPU,"
        f" {1e3 * gpu_s:.1f} ms where they cross to the GPU"
    )
    return replace(plan, kv_attention=where, measures_kv=False, decisions=(*plan.decisions, told))


def described(layers: Collection[int], program: Program, caches: Mapping[str, CachePart]) -> str:
    """What crosses, as one line.

    Args:
        layers: whose keys and values are in main memory; the others: see ``bytes_in_main``.
    """
    every = {node.layer for node in program.nodes if cache_inputs(node)}
    gib = bytes_in_main(program, caches) / 2**30
    return (
        f"keys and values of {len(layers)} of {len(every)} layers, {gib:.1f} GiB, lie in main"
        " memory; the pages that a step reads cross to the GPU"
    )
