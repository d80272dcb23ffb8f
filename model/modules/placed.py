"""Where rules place a model's layers and weights, as the engine follows it with GPUs."""

from __future__ import annotations

from typing import NamedTuple

from pykernels.errors import PykernelsError
from runtime.planning.placement import CPU
from runtime.program import Node, Program

from .placement import ModulePlacement


class Placed(NamedTuple):
    """What rules place.

    Attributes:
        weights: those that are elsewhere than their layer, by name.
        by_layer: GPUs of the layers that are not on the first one; None: no rule places a layer on
            a GPU.
    """

    weights: dict[str, str]
    by_layer: dict[int, str] | None


def placed_nodes(program: Program, placement: ModulePlacement) -> Placed:
    """The weights and layers of a program as rules place them.

    Args:
        placement: by the names of modules; its root is the engine's device, the first of its GPUs.
            Routed experts are where the engine's ``experts`` says.

    Raises:
        PykernelsError: a rule that the engine cannot follow: it keeps a layer on one GPU, but for
            what is on the CPU, and attention with its keys and values there too.
    """
    root, layers, placed = placement.root, dict[int, str](), dict[str, str]()
    for node in program.nodes:
        if node.role != "attention" or node.layer is None:
            continue
        for device in _devices(program, node, placement):
            if device == CPU != root:
                raise PykernelsError(
                    f"a rule places attention of layer {node.layer} on {CPU}; the engine has"
                    f" attention and its keys and values on {root}",
                    "Leave out that rule",
                )
            layers[node.layer] = device
    for node in program.nodes:
        if node.role == "routed":
            continue
        here = root if node.layer is None else layers.get(node.layer, root)
        for name in node.weights.values():
            parts = [part.name for part in program.weights[name].parts]
            devices = {placement.of(part) for part in parts}
            if len(devices) > 1:
                raise PykernelsError(
                    f"rules place {' and '.join(parts)} on several devices; the engine multiplies"
                    " them together",
                    "Place them on one",
                )
            [device] = devices
            if node.layer is not None and device not in (here, CPU):
                raise PykernelsError(
                    f"a rule places {parts[0]} on {device}, and attention of its layer on {here}",
                    "Place the whole layer on one GPU",
                )
            named = node.layer is None and any(_is_named(part, placement) for part in parts)
            if device != here or named:
                placed[name] = device
    elsewhere = {layer: device for layer, device in layers.items() if device != root}
    return Placed(placed, elsewhere or None)


def _is_named(name: str, placement: ModulePlacement) -> bool:
    """Whether a rule places just this, or a module around it that is not the whole model."""
    while name and name not in placement.placed:
        name = name.rpartition(".")[0]
    return bool(name)


def _devices(program: Program, node: Node, placement: ModulePlacement) -> list[str]:
    parts = [part.name for name in node.weights.values() for part in program.weights[name].parts]
    return sorted({placement.of(part) for part in parts})
