"""Slots for experts of each layer on another device, filled anew between steps (SMOE IV-D, E).

A table per layer says which expert is in which slot; at first all slots are empty.
``experts.cache`` decides what they hold.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..program import Program
from ..program.weight_spec import WeightSpec
from .gpu_experts import BY_ROUTER, in_expert_slots
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

    def slots_of(layer: int, experts: WeightSpec) -> WeightSpec:
        return experts.slots(slots[layer])

    return in_expert_slots(program, [layer for layer in slots if slots[layer]], slots_of, devices)
