"""Up to how many tokens of a step each one's results are the bits that it has in a step of its own.

Norms, routers, rotations and the sampler take a token by itself, and so do the tiles of few tokens,
whatever the format: they add up in one order. What does not is the GEMM of many tokens, AMX's tiles
of bfloat16 products, and attention, which splits keys by a token's place alone in steps of few.
"""

from __future__ import annotations

from collections.abc import Iterator

from pykernels.cpu.attention.args import SPLIT_TOKENS
from pykernels.registry import load, resolve
from pykernels.target import detect

from ...machine import tuning
from ...planning.drafts import BatchInvariance
from ...program import Node, Program


def batch_invariance(program: Program, kernel: str) -> BatchInvariance:
    """What holds for a program of this device, of its formats and this CPU's instructions.

    Args:
        kernel: a backend of ``pykernels.registry``, or "auto".
    """
    products = dict.fromkeys(each for node in program.nodes for each in _products(program, node))
    limits = [BatchInvariance(SPLIT_TOKENS, "attention splits the keys of more tokens otherwise")]
    for fmt, activations, gemm in products:
        backend = resolve(kernel, fmt, detect(), activations)
        if gemm:
            most = tuning.gemm_from(backend.name, fmt, activations) - 1
            limits.append(BatchInvariance(most, f"more tokens take the GEMM of {fmt}"))
        if backend.batch_invariant_to is not None:
            most = load(backend.batch_invariant_to)(fmt, activations)
            if most is not None:
                why = f"{backend.name} multiplies {fmt} by more tokens in tiles"
                limits.append(BatchInvariance(most, why))
    return min(limits, key=lambda limit: limit.tokens)


def _products(program: Program, node: Node) -> Iterator[tuple[str, str, bool]]:
    """The formats and activations of a node's matrices, and whether there is a GEMM for them."""
    if node.op == "linear":
        yield program.weight(node, "weight").fmt, node.attr("activations"), True
    elif node.op == "moe_ffn":
        experts = program.weight(node, "experts")
        for fmt in (experts.fmt, experts.down_fmt):
            yield fmt, node.attr("activations"), True
    elif node.op == "per_head_linear":
        yield program.weight(node, "heads").fmt, "bf16", False
