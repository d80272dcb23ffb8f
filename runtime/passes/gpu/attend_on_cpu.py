"""Decode steps in which the CPU attends to keys and values that lie in main memory (SOSP'25 5's
offload of a long context).

Of such a layer only a token's queries, keys and values go to the CPU, and what it attends to comes
back: two channels, and the cache is read where it lies, at the rate of main memory instead of the
link. Chunks of prompts have so many products that they attend on the GPU all the same
(``offload_kv``), over the same cache. Latent attention stays there too: all heads read one latent,
so that a CPU would be busy multiplying.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ...kv_cache.layout import cache_inputs
from ...program import Buffer, Node, Program
from ..layers import rebuilt
from ..order import ordered

_CPU = "cpu"


@ordered
def attend_on_cpu(program: Program, layers: Collection[int]) -> Program:
    """The placed program with the attention of these layers, and what writes their caches, on the
    CPU.

    Args:
        layers: whose caches are in main memory; of latents: they are left as they are.
    """
    moved = {
        node.name
        for node in program.nodes
        if node.layer in layers and node.device != _CPU and "k" in cache_inputs(node)
    }
    if not moved:
        return program
    angles = {
        node.inputs["angles"]
        for node in program.nodes
        if node.name in moved and "angles" in node.inputs
    }
    nodes, buffers = list[Node](), dict[str, Buffer]()
    for node in program.nodes:
        if node.name in moved:
            inputs = dict(node.inputs)
            if "angles" in inputs:
                inputs["angles"] = _there(inputs["angles"])
            node = replace(node, inputs=inputs, device=_CPU)
        nodes.append(node)
        if node.op == "rope_table" and (out := node.outputs["out"]) in angles:
            # Each device makes its own: they are numbers of the positions, which both have.
            buffers[_there(out)] = replace(program.buffers[out], name=_there(out))
            own = {"outputs": {"out": _there(out)}, "name": f"{node.name}.cpu", "device": _CPU}
            nodes.append(replace(node, **own))  # type: ignore[arg-type]
    return rebuilt(program, nodes, buffers)


def _there(angles: str) -> str:
    return f"{angles}.cpu"
