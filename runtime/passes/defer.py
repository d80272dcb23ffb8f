"""Expert Deferral (SOSP'25 4.1): a layer's least experts are added one layer later.

    O_k = I_k + S_k(I_k) + R_k^imm(I_k) + R_(k-1)^def(I_(k-1))

The experts of the ``topk - N`` largest weights are immediate, those of the N smallest are deferred:
what they give joins the residual stream where the *next* layer of routed experts adds up its own.
Nothing is deferred out of the last layer, which adds all of its experts and the deferred ones of
the layer before. What is deferred follows from the weights alone: neither from the device that has
an expert, nor from the slots that it may be in.

On one device this changes what is computed and gains nothing; where a CPU has the experts and a GPU
the rest, the attention of layer k + 1 need not wait for the deferred of k. Prompts gain nothing
(SOSP'25 4.1): their tokens defer nothing, beside those of others that do (the input ``is_prompt``).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from pykernels.errors import PykernelsError

from ..program import Buffer, Node, Program, repeated
from ..program.step_inputs import IS_PROMPT
from .layers import LEAST, check_count, moe_layers, rebuilt, split
from .order import ordered


@ordered
def defer(program: Program, N: int, least: int = LEAST) -> Program:
    """The program with N of each token's experts deferred, if it is not of a prompt.

    Args:
        N: 0: the program itself.
        least: immediate experts at the least.

    Raises:
        PykernelsError: no routed experts, or fewer than ``least`` immediate ones; a norm of them.
    """
    if N == 0:
        return program
    layers = moe_layers(program)
    check_count(program, layers, N, least)
    sums = {layer.sum for layer in layers}
    if any(node.op == "post_norm" and sums & set(node.series("add")) for node in program.nodes):
        raise cannot_join(program.name)
    nodes: list[Node] = []
    buffers: dict[str, Buffer] = {}
    replaced: dict[str, tuple[Node, ...]] = {}
    joins: dict[str, tuple[str, ...]] = {}  # sum of layer k + 1 -> what of k is added beside it
    for layer, behind in pairwise(layers):
        parts = split(program, layer, N, "deferred", "deferred", IS_PROMPT)
        replaced |= parts.replaced
        buffers |= parts.buffers
        joins[behind.sum] = parts.rests
    for node in program.nodes:
        if node.op == "rms_norm":
            adds = node.series("add")
            late = [rest for name in adds for rest in joins.pop(name, ())]
            if late:
                node = replace(node, inputs={**node.inputs, **repeated("add", (*late, *adds))})
        nodes += replaced.get(node.name, (node,))
    if joins:
        raise PykernelsError(
            f"no norm adds up {', '.join(joins)} of {program.name!r}",
            "Defer before the pass that moved that sum",
        )
    return rebuilt(program, nodes, buffers)


def cannot_join(name: str) -> PykernelsError:
    """The error for a model of that name whose experts' sum is normed before it joins."""
    return PykernelsError(
        f"{name!r} norms what a token's experts give together, so that none can join a layer later",
        "Leave out --defer",
    )
