"""Which layers' keys and values stay on a GPU, and which lie in main memory and cross in each step
(``passes.gpu.offload_kv``)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import prod
from types import MappingProxyType

from ...kv_cache.layout import CachePart, cache_inputs
from ...passes.gpu.offload_kv import host_caches
from ...passes.stream_dense import STAGING_BUFFERS
from ...program import Program
from ..compile import compile
from ..execution import ExecutionPlan, Phase
from ..lowerable import Lowerable
from .capacity import STEP_TOKENS, free_for_steps, step_bytes
from .dense import crossing_layers
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
    compiled = compile(model, plan, Phase.PROMPT, tokens or STEP_TOKENS[-1])
    free: Mapping[str, int] = {}
    if asked == "auto" and machine.bounded:
        steps = step_bytes(machine, compiled)
        free = {gpu: n - steps[gpu] for gpu, n in free_for_steps(model, machine, plan).items()}
    found = list[int]()
    for gpu in machine.free:
        layers = cached_layers(compiled.parts[gpu])
        sizes = list(layers.values())
        if asked == "auto":
            more, room = reserved.get(gpu, 0), sum(sizes) + free.get(gpu, 0)
            least = STAGING_BUFFERS * max(sizes, default=0)
            budget = min(sum(sizes), room - (more if room - more >= least else 0))
        else:
            budget = round(float(asked) * 2**30)
        numbers = list(layers)
        found += (numbers[i] for i in crossing_layers(sizes, budget))
    return tuple(sorted(found))


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
