"""Where a weight lies for the nodes that read it, and when it comes there: a record for each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from ..program import Program


class Filled(StrEnum):
    """When a weight comes to the device whose nodes read it."""

    AT_LOAD = "at load"
    """Once, and it stays."""
    EACH_STEP = "each step"
    """It lies in main memory, and all of it crosses in each step (OSDI'26 3.1)."""
    GATHERED = "gathered"
    """Likewise; of a layer's experts those cross that the step's tokens take most (SMOE,
    Algorithm 1)."""
    BETWEEN_STEPS = "between steps"
    """Into slots for a layer's experts, which change while steps run (SMOE IV-D, E)."""


@dataclass(frozen=True)
class Residency:
    """How a device has a weight.

    Attributes:
        device: whose nodes read it.
        experts: of a layer's routed experts, those that the device has; none: all of them.
        slots: of a layer, for experts that come in steps or between them.
        nbytes: of a dense weight that crosses, in the device's layout.
    """

    device: str
    filled: Filled = Filled.AT_LOAD
    experts: tuple[int, ...] = ()
    slots: int = 0
    nbytes: int = 0

    @property
    def crosses(self) -> bool:
        """Whether it lies in main memory, and the device has it for a while in each step."""
        return self.filled in (Filled.EACH_STEP, Filled.GATHERED)


NOWHERE_ELSE: Mapping[str, Residency] = MappingProxyType({})
"""Every weight is where its layer is, from loading on."""


def residency(
    part: Program, decided: Mapping[str, Residency] = NOWHERE_ELSE
) -> dict[str, Residency]:
    """By name, how a device has each weight of its part of a program.

    Args:
        decided: the plan's records (``Placement.residency``), which have a size besides.
    """
    crossing: dict[str, Filled] = {}
    for node in part.nodes:
        if node.role == "load":  # ``unpack_experts``, too, behind what says which come
            filled = Filled.GATHERED if "order" in node.inputs else Filled.EACH_STEP
            crossing = dict.fromkeys(node.weights.values(), filled) | crossing
    found: dict[str, Residency] = {}
    for node in part.nodes:
        for name in node.weights.values():
            spec = part.weights[name]
            if name in crossing:
                when, nbytes = crossing[name], decided[name].nbytes if name in decided else 0
                slots = len(spec.expert_ids) if when is Filled.GATHERED else 0
                found[name] = Residency(node.device, when, slots=slots, nbytes=nbytes)
            elif spec.is_expert_slots:
                found[name] = Residency(node.device, Filled.BETWEEN_STEPS, slots=spec.shape[0])
            else:
                found[name] = Residency(node.device, experts=spec.expert_ids)
    return found
