"""How many tokens a step may have, by what fits into a GPU's memory."""

from __future__ import annotations

import torch

from pykernels.gpu.gemm.unpack import SCRATCH

from ...analysis import experts_per_token
from ...node import Node
from ...placement import CPU, Placement
from ...program import Program
from ...weight_spec import WeightSpec
from ..runner import Lowerable
from .launches.latents import EXPANDED_BYTES
from .memory import dtypes, planned
from .weights import gpu_bytes

STEP_TOKENS = (4096, 2048, 1024, 512)
"""What a step may have, if nobody says: as many as fit, so that weights are read seldom. Beside
experts on the CPU, and at the least, the last one."""
HEADROOM = 1 << 30
"""Bytes of GPU memory that stay free for what nobody counts: kernels, graphs, decode's splits."""
_UNPACKED_KEYS = 2 << 30  # ``worth_unpacking``'s most


def step_tokens(
    model: Lowerable,
    device: torch.device,
    placement: Placement,
    pages: int,
    table_pages: int,
    sequences: int,
    logits: int,
) -> int:
    """The token budget of a step.

    Args:
        device: in the interpreter ("cpu") the fewest.
        placement: of the model's nodes.
        pages: of the cache; ``table_pages``: of one sequence.
        sequences, logits: most of a step.
    """
    if device.type != "cuda" or placement.experts == CPU:
        return STEP_TOKENS[-1]
    free, _ = torch.cuda.mem_get_info(device)
    free -= HEADROOM + sum(part.nbytes for part in model.caches(pages).values())
    for T in STEP_TOKENS[:-1]:
        program = model.lower(T, sequences, min(T, max(logits, sequences)), pages, table_pages)
        missing = (s for s in program.weights.values() if not model.store.is_made(s, device))
        if sum(map(gpu_bytes, missing)) + step_bytes(program) <= free:
            return T
    return STEP_TOKENS[-1]


def room_for_experts(
    device: str, model: Lowerable, sizes: tuple[int, int, int, int, int], placement: Placement
) -> int:
    """Bytes of a GPU that experts may take beside the rest of a model, its cache and its steps;
    below 0 where these alone are too much.

    Args:
        device: "cuda:N"; "cpu" in Triton's interpreter, where any number fit.
        sizes: arguments of the model's ``lower``: T, S and R of the largest step, pages of the
            cache and of a sequence.
        placement: of all that is no routed expert.
    """
    where = torch.device(device)
    if where.type != "cuda":
        return 1 << 62
    free, _ = torch.cuda.mem_get_info(where)
    program = model.lower(*sizes)
    cache = sum(part.nbytes for part in model.caches(sizes[3]).values())

    def missing(spec: WeightSpec) -> int:
        return 0 if model.store.is_made(spec, where) else gpu_bytes(spec)

    rest = placement.nbytes(program, str(where), missing)
    return free - HEADROOM - cache - rest - step_bytes(program)


def step_bytes(program: Program) -> int:
    """Bytes that a step's buffers take, and what its launches allocate beside them."""
    return planned(program, dtypes(program)).nbytes + max(
        (_temporary(program, node) for node in program.nodes), default=0
    )


def _temporary(program: Program, node: Node) -> int:
    T = program.sizes["T"]
    if node.op == "moe_ffn":  # rows of pairs: sorted, permuted, within experts, behind them
        _, H, inner = program.weight(node, "experts").shape
        each = experts_per_token(program, node.inputs["ids"]) if "ids" in node.inputs else 1
        return 2 * T * each * (3 * H + 2 * inner) + SCRATCH
    if node.op == "attention_expanded":
        return EXPANDED_BYTES
    if node.op == "attention" and "k_scale" in node.inputs:
        table, k = program.shape(node.inputs["page_table"]), program.shape(node.inputs["k"])
        room = 4 * table[0] * table[1] * k[1] * k[2] * k[3]
        return room if room <= _UNPACKED_KEYS else 0
    return 0
