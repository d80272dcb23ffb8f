"""What each device computes of a program."""

from __future__ import annotations

from runtime.passes.keep_routing import routers
from runtime.program import Program
from runtime.runner.slots import Slots

from .interface import DevicePart


def parts(program: Program, slots: Slots | None) -> tuple[DevicePart, ...]:
    """The part of each device, in the order of their names.

    Args:
        program: of a runner's decode steps.
        slots: those of the experts that change; None: there are none.
    """
    found = []
    beside = {node.layer: node for node in program.nodes if node.role == "cached"}
    chooses = {node.layer for node in routers(program)}
    for device in sorted({node.device for node in program.nodes}):
        own = [node for node in program.nodes if node.device == device and node.layer is not None]
        experts = {n.layer for n in own if n.op == "moe_ffn" and n.role != "shared"} & chooses
        here = [node for node in beside.values() if node.device == device]
        room = sum(spec.shape[0] for spec in slots.specs) if here and slots is not None else 0
        fixed = sum(len(program.weight(node, "experts").chosen) for node in here)
        layers = {node.layer for node in own}
        found.append(DevicePart(device, _sorted(layers), _sorted(experts), room, fixed))
    return tuple(found)


def _sorted(layers: set[int | None]) -> tuple[int, ...]:
    return tuple(sorted(layer for layer in layers if layer is not None))
