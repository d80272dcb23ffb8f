"""Expert Skipping, which Expert Deferral is held against (SOSP'25 6.3): the N experts of a token
with the smallest weights are not computed at all.

They "simply discard" them: the other weights stay what they are, no sum is made 1 again. The last
layer skips as well.
"""

from __future__ import annotations

from ..program import Buffer, Node, Program
from .layers import LEAST, check_count, moe_layers, rebuilt, split
from .order import ordered


@ordered
def skip(program: Program, N: int, least: int = LEAST) -> Program:
    """The program without N of each token's experts.

    Args:
        N: 0: the program itself.
        least: experts that stay, at the least.

    Raises:
        PykernelsError: no routed experts, or fewer than ``least`` would stay; some are deferred, or
            in slots.
    """
    if N == 0:
        return program
    layers = moe_layers(program)
    check_count(program, layers, N, least)
    replaced: dict[str, tuple[Node, ...]] = {}
    buffers: dict[str, Buffer] = {}
    for layer in layers:
        parts = split(program, layer, N, "skipped", None)
        replaced |= parts.replaced
        buffers |= parts.buffers
    nodes = [new for node in program.nodes for new in replaced.get(node.name, (node,))]
    return rebuilt(program, nodes, buffers)
