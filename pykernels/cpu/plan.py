"""How a call is cut into tasks: data, from shapes alone, for a test or a notebook to change."""

from __future__ import annotations

from dataclasses import dataclass

from ..quant import Format
from ..quant.layout import N_BLOCK, padded
from ..shapes import MoEShape
from .gemm_amx import MAX_BLOCKS

# The last task to finish idles the other threads for about 1 / 32 of a stage. Cutting finer costs
# more: every task begins a stream that the prefetchers have to find again (measured: 3 % at half a
# MiB). A GEMM task reads all its expert's tokens, so there it pays to take more outputs at once.
_TASKS_PER_THREAD, _GEMM_TASKS_PER_THREAD = 32, 6
_TASK_BYTES = 4 << 20  # longer runs gain nothing

GEMM_FROM = 5
"""Tokens of an expert from which the GEMM is taken to win over tiles where nobody measured it
(SOSP'25 Figure 7: more than four)."""

GEMM_BACKENDS = ("amx",)
"""Backends that have a GEMM beside their tiles; the others only ever run tiles."""

_CROWDED = 5  # tokens of an expert from which its time is that of products, not of reading weights


@dataclass(frozen=True)
class MoEPlan:
    """The cut of one call.

    Attributes:
        i_chunk: 32-row blocks of the intermediate size in a gate-up task (of one expert).
        h_chunk: 32-row blocks of the hidden size in a down task (of all active experts).
        gemm_from: tokens of an expert from which its weights go through the GEMM.
    """

    i_chunk: int
    h_chunk: int
    gemm_from: int = GEMM_FROM


def plan(
    shape: MoEShape, fmt: Format, threads: int, T: int = 1, gemm_from: int = GEMM_FROM
) -> MoEPlan:
    """The default cut: as long as balance allows, up to 4 MiB.

    Args:
        threads: that share the tasks.
        T: tokens of the call; ``min(E, T * topk)`` experts are taken to be active.
        gemm_from: as in ``MoEPlan``; what this machine was calibrated to.
    """
    i_blocks = padded(shape.I, 1)[0] // N_BLOCK
    h_blocks = padded(shape.H, 1)[0] // N_BLOCK
    active = min(shape.E, T * shape.topk)
    crowded = T * shape.topk >= min(gemm_from, _CROWDED) * active
    wanted = (_GEMM_TASKS_PER_THREAD if crowded else _TASKS_PER_THREAD) * threads

    def chunk(blocks: int, units: int, block_bytes: int) -> int:
        balanced = max(1, blocks * units // wanted)
        longest = blocks if crowded else -(-_TASK_BYTES // block_bytes)
        return min(balanced, longest, blocks)

    return MoEPlan(
        i_chunk=min(MAX_BLOCKS // 2, chunk(i_blocks, active, 2 * fmt.block_bytes(shape.H))),
        h_chunk=min(MAX_BLOCKS, chunk(h_blocks, 1, shape.topk * fmt.block_bytes(shape.I))),
        gemm_from=gemm_from,
    )
