"""What a step of a program reads from memory: the roof of a decode step is these bytes."""

from __future__ import annotations

import math

from ..analysis import experts_per_token, share_of_experts
from ..kv_cache.layout import cache_inputs
from ..program import Program


def weight_bytes(program: Program, tokens: int = 1, device: str | None = None) -> int:
    """Packed weights and scales that a step reads: every matrix once; of the routed experts as
    many as ``tokens`` tokens take if each chooses its own at random (exact for one token)."""
    total = 0.0
    for node in program.nodes:
        if device is not None and node.device != device:
            continue
        for name in node.weights:
            weight = program.weight(node, name)
            if name in ("weight", "heads") and node.op in ("linear", "per_head_linear"):
                total += weight.nbytes
            elif name == "experts":
                share, ids = share_of_experts(program, node), node.inputs.get("ids")
                E = (weight.whole or weight).shape[0] * share
                topk = E if ids is None else experts_per_token(program, ids) * share
                if not E:
                    continue
                total += weight.bytes_per_expert * expected_experts(E, topk, tokens)
    return round(total)


def expected_experts(E: float, topk: float, tokens: int) -> float:
    """Distinct experts of E that ``tokens`` tokens take, ``topk`` each, drawn independently."""
    return E * (1 - (1 - topk / E) ** tokens)


def cache_bytes(program: Program, context: int) -> int:
    """Keys and values that one token reads at a context of so many."""
    total = 0
    for node in program.nodes:
        if node.op == "attention":
            keys = min(context, node.attr("window") or context)
            parts = (program.buffers[name] for name in cache_inputs(node).values())
            total += keys * sum(
                math.prod(program.shape(part.name)[2:]) * part.dtype.itemsize for part in parts
            )
    return total
