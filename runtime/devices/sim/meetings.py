"""What it takes where devices meet: a hop, and the bytes that one of them sends.

A collective of ranks is nodes that read what others have written (``passes.shard.join``), so that
its bytes are those of these meetings. GPUs without peer links send through main memory: over the
sender's link there, and over the receiver's, where experts may come meanwhile.
"""

from __future__ import annotations

import math

from ...planning.placement import CPU
from ...program import Node, Program
from .machine import Machine
from .terms import HOP, LINK, PEER, Cost

MEETS = ("submit", "wait")


def met(node: Node, program: Program, machine: Machine, tokens: int) -> Cost:
    """The cost of an end of a channel.

    Args:
        program: of the node's device; ``tokens``: that the step has.
    """
    gpu, sends = machine.gpu, node.op == "submit"
    if gpu is None:
        return Cost(bound=HOP)
    nbytes = _sent(node, program, tokens)
    peer = node.attr("to") if sends else node.attr("source")
    if CPU in (node.device, peer):
        hop = gpu.hop_us * 0.5e-6
        if node.device == CPU:  # the GPU's end writes and reads pinned memory
            return Cost(hop, bound=HOP)
        crossing = nbytes / (gpu.link_gbps * 1e9)
        bound = LINK if crossing > hop else HOP
        return Cost(hop + crossing, nbytes, bound, link_bytes=0.0 if sends else nbytes)
    hop = gpu.peer_us * 0.5e-6
    if gpu.peer_gbps is None:
        crossing = nbytes / (gpu.link_gbps * 1e9)
        return Cost(hop + crossing, nbytes, PEER, link_bytes=0.0 if sends else nbytes)
    return Cost(hop + (0.0 if sends else nbytes / (gpu.peer_gbps * 1e9)), bound=PEER)


def _sent(node: Node, program: Program, tokens: int) -> float:
    """Bytes of a channel in a step of fewer tokens than its program has room for."""
    total, most = 0.0, int(program.sizes["T"])
    for name in node.series("value"):
        shape = program.shape(name)
        rows = shape[0] * min(1.0, tokens / most) if shape and shape[0] % most == 0 else shape[0]
        total += rows * math.prod(shape[1:]) * program.buffers[name].dtype.itemsize
    return total
