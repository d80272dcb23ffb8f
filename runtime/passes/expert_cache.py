"""Slots for experts of each layer on another device, filled anew between steps (SMOE IV-D, E).

Which expert is in which slot says a table of each layer, kept from step to step; at first there is
none in any. ``experts.cache`` decides what the slots hold.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..program import Program
from ..program.weight_spec import WeightSpec
from .gpu_experts import BY_ROUTER, in_slots
from .order import ordered


@ordered
def expert_cache(
    program: Program, slots: Mapping[int, int], devices: Mapping[int, str] = BY_ROUTER
) -> Program:
    """The program with slots for experts on another device.

    Args:
        slots: by layer, how many it has.
        devices: by layer, that which has its slots; else that of the layer's router.

    Raises:
        PykernelsError: no such layer, more slots than experts; some are deferred or on that device
            already.
    """

    def room(layer: int, experts: WeightSpec) -> WeightSpec:
        return experts.slots(slots[layer])

    return in_slots(program, [layer for layer in slots if slots[layer]], room, devices)
