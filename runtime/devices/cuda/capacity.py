"""What fits into a GPU's memory: where experts are, and how many tokens a step may have."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pykernels.errors import PykernelsError
from pykernels.gpu.gemm.unpack import SCRATCH

from ...analysis import experts_per_token
from ...matrix import PackedHeads, PackedMatrix
from ...node import Node
from ...program import Program
from ..runner import Lowerable
from .latents import EXPANDED_BYTES
from .memory import dtypes, planned
from .weights import experts_bytes, is_made

EXPERTS = ("auto", "cpu", "gpu")
STEP_TOKENS = (4096, 2048, 1024, 512)
"""What a step may have, if nobody says: as many as fit, so that weights are read seldom. Beside
experts on the CPU, and at the least, the last one."""
HEADROOM = 1 << 30
"""Bytes of GPU memory that stay free for what nobody counts: kernels, graphs, decode's splits."""
_UNPACKED_KEYS = 2 << 30  # ``worth_unpacking``'s most


@dataclass(frozen=True)
class Capacity:
    """Where routed experts are, "cpu" or "gpu", and the token budget of a step."""

    experts: str
    tokens: int


def choose(
    model: Lowerable,
    device: torch.device,
    experts: str,
    tokens: int | None,
    pages: int,
    table_pages: int,
    sequences: int,
    logits: int,
) -> Capacity:
    """What "auto" experts and no number of ``tokens`` stand for.

    Args:
        device: in the interpreter ("cpu") all experts fit, with steps of the fewest tokens.
        pages: of the cache; ``table_pages``: of one sequence.
        sequences, logits: most of a step.

    Raises:
        PykernelsError: no such place for experts.
    """
    if experts not in EXPERTS:
        raise PykernelsError(f"experts on {experts!r}", f"Give {', '.join(EXPERTS)}")
    fewest = tokens or STEP_TOKENS[-1]
    if experts == "cpu":
        return Capacity(experts, fewest)
    if device.type != "cuda":
        return Capacity("gpu", fewest)
    free, _ = torch.cuda.mem_get_info(device)
    cache = sum(part.nbytes for part in model.caches(pages).values())
    for T in (tokens,) if tokens else STEP_TOKENS:
        program = model.lower(T, sequences, min(T, max(logits, sequences)), pages, table_pages)
        if weights_bytes(program, device) + cache + step_bytes(program) + HEADROOM <= free:
            return Capacity("gpu", T)
    return Capacity("cpu" if experts == "auto" else "gpu", fewest)


def weights_bytes(program: Program, device: torch.device) -> int:
    """Of all weights that are still to be copied to the GPU; of linears at most."""
    total = 0
    for node in program.nodes:
        for weight in node.weights.values():
            if isinstance(weight, torch.Tensor):
                total += 2 * weight.numel() if node.op == "embed" else 0
            elif weight is not None and not is_made(weight, device):
                total += experts_bytes(weight) if node.op == "moe_ffn" else _dense_bytes(weight)
    return total


def _dense_bytes(weight: PackedMatrix | PackedHeads) -> int:
    """Of a matrix, or one for each head, in bfloat16."""
    return 2 * weight.N * weight.K * (weight.G if isinstance(weight, PackedHeads) else 1)


def step_bytes(program: Program) -> int:
    """Of a step's buffers, and of what its launches allocate beside them."""
    return planned(program, dtypes(program)).nbytes + max(
        (_temporary(program, node) for node in program.nodes), default=0
    )


def _temporary(program: Program, node: Node) -> int:
    T = program.sizes["T"]
    if node.op == "moe_ffn":  # rows of pairs: sorted, permuted, within experts, behind them
        shape = node.weights["experts"].shape
        each = experts_per_token(program, node.inputs["ids"]) if "ids" in node.inputs else 1
        return 2 * T * each * (3 * shape.H + 2 * shape.I) + SCRATCH
    if node.op == "attention_expanded":
        return EXPANDED_BYTES
    if node.op == "attention" and "k_scale" in node.inputs:
        table, k = program.shape(node.inputs["page_table"]), program.shape(node.inputs["k"])
        room = 4 * table[0] * table[1] * k[1] * k[2] * k[3]
        return room if room <= _UNPACKED_KEYS else 0
    return 0
