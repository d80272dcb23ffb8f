"""What each device computes of a program."""

from __future__ import annotations

from runtime.passes.keep_routing import routers
from runtime.program import Program
from runtime.runner.expert_slots import ExpertSlots

from .interface import DevicePart


def parts(program: Program, slots: ExpertSlots | None) -> tuple[DevicePart, ...]:
    """The part of each device, in the order of their names.

    Args:
        program: of a runner's decode steps.
        slots: those of the experts that change; None: there are none.
    """
    device_parts = []
    beside = {node.layer: node for node in program.nodes if node.role == "cached"}
    chooses = {node.layer for node in routers(program)}
    for device in sorted({node.device for node in program.nodes}):
        own = [node for node in program.nodes if node.device == device and node.layer is not None]
        experts = {n.layer for n in own if n.op == "moe_ffn" and n.role != "shared"} & chooses
        here = [node for node in beside.values() if node.device == device]
        num_slots = sum(spec.shape[0] for spec in slots.specs) if here and slots is not None else 0
        fixed = sum(len(program.weight(node, "experts").expert_ids) for node in here)
        layers = {node.layer for node in own}
        device_parts.append(DevicePart(device, _sorted(layers), _sorted(experts), num_slots, fixed))
    return tuple(device_parts)


def _sorted(layers: set[int | None]) -> tuple[int, ...]:
    return tuple(sorted(layer for layer in layers if layer is not None))
