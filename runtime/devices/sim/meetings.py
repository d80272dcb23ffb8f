"""What it takes where devices meet: a hop, and the bytes that one of them sends.

A collective of ranks is nodes that read what others have written (``passes.shard.join``), so that
its bytes are those of these meetings. GPUs without peer links send through main memory, piece by
piece: over the sender's link while over the receiver's, where experts may come meanwhile.
"""

from __future__ import annotations

import math

from ...planning.placement import CPU
from ...program import Node, Program
from ...program.op_table.collectives import ALL_TOKENS
from .machine import Machine
from .terms import HOP, LINK, PEER, Cost

MEETS = ("submit", "wait")
HOP_BYTES = 4 * 7168
"""That cross each way within a hop of the CPU, as ``python -m bench.handshake`` times it."""


def met(node: Node, program: Program, machine: Machine, filled: float) -> Cost:
    """The cost of an end of a channel.

    Args:
        program: of the node's device; ``filled``: the part of its tokens that the step has.
    """
    gpu, sends = machine.gpu, node.op == "submit"
    if gpu is None:
        return Cost(bound=HOP)
    nbytes = _sent(node, program, filled)
    peer = node.attr("to") if sends else node.attr("source")
    if CPU in (node.device, peer):
        hop = gpu.hop_us * 0.5e-6
        if node.device == CPU:  # the GPU's end writes and reads pinned memory
            return Cost(hop, bound=HOP)
        crossing = nbytes / (gpu.link_gbps * 1e9)
        bound = LINK if crossing > hop else HOP
        hop -= min(hop, HOP_BYTES / (gpu.link_gbps * 1e9))
        return Cost(hop + crossing, nbytes, bound, link_bytes=0.0 if sends else nbytes)
    hop = gpu.peer_us * 0.5e-6
    if sends:
        return Cost(hop, bound=PEER)
    crossing = nbytes / ((gpu.peer_gbps or gpu.link_gbps) * 1e9)
    if gpu.peer_gbps is not None:
        return Cost(hop + crossing, bound=PEER)
    return Cost(hop + crossing, 2 * nbytes, PEER, link_bytes=nbytes)


def _sent(node: Node, program: Program, filled: float) -> float:
    """Bytes of a channel in a step. A rank has room for all of its pairs of tokens and experts to
    go to one other rank, of which each gets as many."""
    total, T = 0.0, int(program.sizes["T"])
    ranks = int(program.sizes.get(ALL_TOKENS, T)) // T
    for name in node.series("value"):
        shape, buffer = program.shape(name), program.buffers[name]
        part = filled if shape and shape[0] % T == 0 else 1.0
        if buffer.filled:
            part /= ranks
        total += part * math.prod(shape) * buffer.dtype.itemsize
    return total
