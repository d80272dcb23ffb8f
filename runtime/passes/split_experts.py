"""Prompts of middle length on two devices (SMOE, Algorithm 1): some
experts of each layer cross to a GPU, while the CPU computes the others.

Where tokens are few, the CPU takes as long for an expert as reading it does, whatever its load; so
which experts cross matters little, and how many do decides. They are the same in every step of a
program, so a layer's cross while the layer before is computed, and the link never waits for a
router, as it would for the experts that are loaded most. The CPU has its part before: it begins
right behind the router.
"""

from __future__ import annotations

from collections.abc import Callable

from ..machine.nodes import ONE_NODE, MemoryNodes
from ..program import Program
from ..weight_spec import WeightSpec
from .gpu_experts import in_slots
from .layers import moe_layers
from .stream_weights import Ring, streamed


def split_experts(
    program: Program,
    share: float,
    room: Callable[[WeightSpec], int],
    ring: Ring | None = None,
    nodes: MemoryNodes = ONE_NODE,
) -> Program:
    """The program with a share of each layer's experts computed on the device of its router, to
    which they cross, and the others where they are.

    Args:
        share: of a layer's experts, 0 to 1; one at the least crosses, and one stays.
        room, ring, nodes: see ``stream_weights``.

    Raises:
        PykernelsError: no routed experts; some are deferred, streamed, or on that device already.
    """

    def some(_: int, experts: WeightSpec) -> WeightSpec:
        E = experts.shape[0]
        return experts.some(range(min(E - 1, max(1, round(share * E)))))

    layers = [layer.experts.layer for layer in moe_layers(program)]
    own = [number for number in layers if number is not None]
    parted = in_slots(program, own, some, label=f".{share:g}")
    moved = [node for node in parted.nodes if node.role == "cached"]
    return streamed(parted, moved, room, ring or Ring(), nodes)
