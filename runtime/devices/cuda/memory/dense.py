"""Which dense weights stay on a GPU, and which lie in main memory and cross to it in each step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pykernels.errors import PykernelsError

from ....machine.pinned import Pinned
from ....passes.keep_routing import keep_routing
from ....passes.stream_dense import SLOTS, dense_weights
from ....planning.placement import CPU, Placement
from ....program import Program
from ....program.node import Node
from ....program.partition import partition
from ....program.sizes import StepSizes
from ....program.weights import LayoutOf, WeightStore
from ....runner.paged_runner import Lowerable
from ...gpus import Gpus, interpreted
from .blocks import Staged
from .buffers import dtypes
from .capacity import STEP_TOKENS, room_for_steps, step_bytes
from .weights import layout_bytes


def staged_weights(
    model: Lowerable,
    gpus: Gpus,
    placement: Placement,
    sizes: StepSizes,
    asked: float | str,
    tokens: int | None = None,
) -> dict[str, int]:
    """The dense weights that cross in each step, as ``Placement.staged`` has them.

    Args:
        gpus: in Triton's interpreter there is always room.
        asked: ``EngineConfig.dense_gib``.
        tokens: budget of a step; None: the fewest of ``STEP_TOKENS``.
    """
    program = placement.apply(keep_routing(model.lower(sizes.of(tokens or STEP_TOKENS[-1]))))
    kinds, found = dtypes(program), dict[str, int]()
    rooms = dict[str, int]()
    if asked == "auto" and not interpreted(gpus):
        parts = partition(program)
        free = room_for_steps(model, gpus, placement, program, sizes.pages)
        rooms = {name: room - step_bytes(parts[name]) for name, room in free.items()}
    for gpu in gpus:
        layers: dict[int, dict[str, int]] = {}
        for node in program.nodes:
            if node.device == gpu and node.layer is not None:
                for port, name in dense_weights(program, node):
                    nbytes = layout_bytes(program, node, port, kinds)
                    layers.setdefault(node.layer, {})[name] = nbytes
        each = [sum(layer.values()) for layer in layers.values()]
        if asked == "auto":
            budget = sum(each) + min(0, rooms.get(gpu, 0))
        else:
            budget = round(float(asked) * 2**30)
        own = list(layers.values())
        for i in crossing_layers(each, budget):
            found |= own[i]
    return found


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
        chosen = [(2 * i + 1) * n // (2 * count) for i in range(count)]
        slots = min(SLOTS, count) * max(sizes[i] for i in chosen)
        if sum(sizes) - sum(sizes[i] for i in chosen) + slots <= budget:
            return chosen
    return [*range(n)]


def pin_staged(program: Program, store: WeightStore, layout_of: LayoutOf, pinned: Pinned) -> None:
    """Pins the weights that cross in a program's steps.

    Raises:
        PykernelsError: the system does not allow it.
    """
    for node, port in _loaded(program):
        held: Staged = store.get(program.weight(node, port), *layout_of(node, port))
        if reason := pinned.add(held.memory):
            raise PykernelsError(
                f"dense weights cannot cross to the GPU: {reason}",
                "Raise the limit of locked memory (ulimit -l), or leave dense_gib at auto",
            )


def _loaded(program: Program) -> Iterator[tuple[Node, str]]:
    for node in program.nodes:
        if node.op == "load_weights" and node.device != CPU:
            for port in node.weights:
                yield node, port


def described(placement: Placement, program: Program) -> str:
    """What crosses, as one line."""
    layers = {
        node.layer
        for node in program.nodes
        if any(name in placement.staged for name in node.weights.values())
    }
    every = {node.layer for node in program.nodes if node.layer is not None}
    gib = sum(placement.staged.values()) / 2**30
    return (
        f"dense weights of {len(layers)} of {len(every)} layers, {gib:.1f} GiB, cross to the GPU in"
        " each step"
    )
