"""Which dense weights stay on a GPU, and which lie in main memory and cross to it in each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...passes.stream_dense import STAGING_BUFFERS, dense_weights
from ...program import Program
from ..compile import compile
from ..execution import ExecutionPlan, Phase
from ..lowerable import Lowerable
from ..residency import Filled, Residency
from .capacity import STEP_TOKENS, free_for_steps, step_bytes
from .machine import Machine


def crossing_weights(
    model: Lowerable,
    machine: Machine,
    plan: ExecutionPlan,
    asked: float | str,
    tokens: int | None = None,
) -> dict[str, Residency]:
    """Records of the dense weights that cross in each step.

    Args:
        machine: in Triton's interpreter there is always room.
        plan: in which none cross yet.
        asked: ``ExecutionConfig.dense_gib``.
        tokens: budget of a step; None: the fewest of ``STEP_TOKENS``.
    """
    compiled = compile(model, plan, Phase.PROMPT, tokens or STEP_TOKENS[-1])
    free: Mapping[str, int] = {}
    if asked == "auto" and machine.bounded:
        steps = step_bytes(machine, compiled)
        free = {gpu: n - steps[gpu] for gpu, n in free_for_steps(model, machine, plan).items()}
    found: dict[str, Residency] = {}
    for gpu in machine.free:
        layers = _by_layer(machine, compiled.parts[gpu])
        sizes = [sum(layer.values()) for layer in layers]
        if asked == "auto":
            budget = sum(sizes) + min(0, free.get(gpu, 0))
        else:
            budget = round(float(asked) * 2**30)
        for i in crossing_layers(sizes, budget):
            found |= {
                name: Residency(gpu, Filled.EACH_STEP, nbytes=nbytes)
                for name, nbytes in layers[i].items()
            }
    return found


def _by_layer(machine: Machine, part: Program) -> list[dict[str, int]]:
    """Bytes of each layer's dense weights on a GPU, by name."""
    layers: dict[int, dict[str, int]] = {}
    for node in part.nodes:
        if node.layer is not None:
            for port, name in dense_weights(part, node):
                nbytes = machine.layouts.crossing_bytes(part, node, port)
                layers.setdefault(node.layer, {})[name] = nbytes
    return list(layers.values())


def crossing_layers(sizes: Sequence[int], budget: int) -> list[int]:
    """The numbers of the layers that cross, as few as can be, spread over all; all of them if even
    so they need more.

    Args:
        sizes: bytes of each layer; ``budget``: of those that stay, and of the slots for the others.
    """
    n = len(sizes)
    if sum(sizes) <= budget:
        return []
    for count in range(1, n + 1):
        chosen = spread(n, count)
        buffers = min(STAGING_BUFFERS, count) * max(sizes[i] for i in chosen)
        if sum(sizes) - sum(sizes[i] for i in chosen) + buffers <= budget:
            return chosen
    return [*range(n)]


def spread(n: int, count: int) -> list[int]:
    """``count`` of the numbers below ``n``, as far from each other as can be."""
    return [(2 * i + 1) * n // (2 * count) for i in range(count)]


def described(records: Mapping[str, Residency], program: Program) -> str:
    """What crosses, as one line.

    Args:
        records: of it.
    """
    layers = {
        node.layer
        for node in program.nodes
        if any(name in records for name in node.weights.values())
    }
    every = {node.layer for node in program.nodes if node.layer is not None}
    gib = sum(record.nbytes for record in records.values()) / 2**30
    return (
        f"dense weights of {len(layers)} of {len(every)} layers, {gib:.1f} GiB, cross to the GPU in"
        " each step"
    )
