"""What a step of a program reads from memory and computes, node by node: the roof of a decode step
is these bytes, that of a long prompt these operations."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..kv_cache.layout import cache_inputs
from ..program import Node, Program
from ..program.analysis import experts_per_token, share_of_experts
from ..program.step_inputs import STATE_SLOTS


def weight_bytes(program: Program, tokens: int = 1, device: str | None = None) -> int:
    """Packed weights and scales that a step reads: every matrix once; of the routed experts as
    many as ``tokens`` tokens take if each chooses its own at random (exact for one token)."""
    nodes = [node for node in program.nodes if device is None or node.device == device]
    return round(sum(_weight_bytes(program, node, tokens) for node in nodes))


def expert_bytes(program: Program, tokens: int = 1, device: str | None = None) -> int:
    """Bytes of routed experts that a step reads; see ``weight_bytes``."""
    routed = [
        node
        for node in program.nodes
        if "experts" in node.weights and "ids" in node.inputs and device in (None, node.device)
    ]
    return round(sum(_weight_bytes(program, node, tokens) for node in routed))


def _weight_bytes(program: Program, node: Node, tokens: int, whole: Program | None = None) -> float:
    whole, total = whole or program, 0.0
    for name in node.weights:
        weight = program.weight(node, name)
        if name in ("weight", "heads") and node.op in ("linear", "per_head_linear"):
            total += weight.nbytes
        elif name == "experts":
            share, ids = share_of_experts(whole, node), node.inputs.get("ids")
            E = (weight.full or weight).shape[0] * share
            topk = E if ids is None else experts_per_token(whole, ids) * share
            if not E:
                continue
            total += weight.bytes_per_expert * expected_experts(E, topk, tokens)
    return total


@dataclass(frozen=True)
class Work:
    """What a node does in a step.

    Attributes:
        nbytes: bytes of weights and of the cache that it reads.
        flops: multiplications and additions of its matrix products.
    """

    nbytes: int
    flops: int


def work(
    program: Program, tokens: int = 1, context: int = 0, whole: Program | None = None
) -> dict[str, Work]:
    """What a step reads and computes, by node.

    Args:
        tokens: of the step, all of one sequence; ``context``: keys that each of them reads.
        whole: the program that ``program`` is a device's part of, which says what of a token's
            experts other nodes and devices have; None: itself.
    """
    return {
        node.name: Work(
            round(_weight_bytes(program, node, tokens, whole))
            + _cache_bytes(program, node, context)
            + _loaded_bytes(program, node, context),
            round(_flops(program, node, tokens, context, whole or program)),
        )
        for node in program.nodes
    }


def _flops(program: Program, node: Node, tokens: int, context: int, whole: Program) -> float:
    if node.op == "linear":
        N, K = program.weight(node, "weight").shape
        rows = program.shape(node.outputs["out"])[0]  # of a head: those of logits alone
        return 2 * N * K * min(tokens, rows)
    if node.op == "per_head_linear":
        return 2 * math.prod(program.weight(node, "heads").shape) * tokens
    if node.op == "moe_ffn":
        _, H, I = program.weight(node, "experts").shape  # noqa: E741
        ids, share = node.inputs.get("ids"), share_of_experts(whole, node)
        each = 1.0 if ids is None else experts_per_token(whole, ids) * share
        return 3 * 2 * H * I * each * tokens
    if node.op == "attention":
        keys = min(context, node.attr("window") or context)
        heads, dk, dv = (node.attr(name) for name in ("heads", "dk", "dv"))
        return 2 * heads * (dk + dv) * keys * tokens
    return 0


@dataclass(frozen=True)
class Crossing:
    """Bytes of a step that NUMA nodes read from each other's memory.

    Attributes:
        weights: of matrices and experts that are not sliced: interleaved, so that of n nodes each
            reads 1 / n in its own memory.
        cache: keys and values, interleaved too.
        activations: what one node's workers read that others may have written; at most.
    """

    weights: int
    cache: int
    activations: int


def crossing_bytes(program: Program, nodes: int, tokens: int = 1, context: int = 0) -> Crossing:
    """What crosses nodes in a step of a program (``passes.numa`` has sliced it, or not).

    Args:
        tokens: of the step, all of one sequence; ``context``: keys that each reads.
    """
    elsewhere = (nodes - 1) / nodes
    shared = [node for node in program.nodes if node.numa is None]
    writers: dict[str, set[int | None]] = {}
    activations = 0
    for node in program.nodes:
        for name in node.reads:
            buffer = program.buffers[name]
            in_place = name in node.writes  # its own columns or rows alone
            own = node.numa is not None and writers.get(name) == {node.numa}
            if buffer.kind == "scratch" and not in_place and not own:
                inner = math.prod(program.shape(name)[1:]) * buffer.dtype.itemsize
                activations += inner * min(tokens, program.shape(name)[0])
        for name in node.writes:
            writers.setdefault(name, set()).add(node.numa)
    return Crossing(
        round(elsewhere * sum(_weight_bytes(program, node, tokens) for node in shared)),
        round(elsewhere * tokens * cache_bytes(program, context)),
        activations,
    )


def expected_experts(E: float, topk: float, tokens: int) -> float:
    """Distinct experts of E that ``tokens`` tokens take, ``topk`` each, drawn independently."""
    return E * (1 - (1 - topk / E) ** tokens)


def cache_bytes(program: Program, context: int) -> int:
    """Keys, values and states that one token reads at a context of so many."""
    return sum(_cache_bytes(program, node, context) for node in program.nodes)


def _loaded_bytes(program: Program, node: Node, context: int) -> int:
    """Keys and values of a sequence that a node brings from main memory."""
    if node.op != "load_pages":
        return 0
    lists = {n.outputs["pages"]: n for n in program.nodes if n.op == "list_pages"}
    window = lists[node.inputs["pages"]].attr("window")
    return min(context, window or context) * sum(
        _row_bytes(program, name, 2) for name in node.series("cache")
    )


def _cache_bytes(program: Program, node: Node, context: int) -> int:
    if node.op == "attention":
        keys, leading = min(context, node.attr("window") or context), 2  # pages, tokens
        names = list(cache_inputs(node).values())
    elif STATE_SLOTS in node.inputs:
        keys, leading = 1, 1  # slots
        names = [name for name in node.reads if program.buffers[name].kind == "cache"]
    else:
        return 0
    return keys * sum(_row_bytes(program, name, leading) for name in names)


def _row_bytes(program: Program, name: str, leading: int) -> int:
    """Bytes of a buffer behind its first dimensions."""
    return math.prod(program.shape(name)[leading:]) * program.buffers[name].dtype.itemsize
