"""How a call is cut into tasks: data, from shapes alone, for a test or a notebook to change."""

from __future__ import annotations

from dataclasses import dataclass

from ..quant import Format
from ..quant.layout import N_BLOCK, padded
from ..shapes import MoEShape

# The last task to finish idles the other threads for about 1 / 32 of a stage. Cutting finer costs
# more: every task begins a stream that the prefetchers have to find again (measured:
# 3 % at half a MiB).
_TASKS_PER_THREAD = 32
_TASK_BYTES = 4 << 20  # longer runs gain nothing


@dataclass(frozen=True)
class MoEPlan:
    """32-row blocks that one task takes.

    Attributes:
        i_chunk: blocks of the intermediate size in a gate-up task (of one expert).
        h_chunk: blocks of the hidden size in a down task (of all active experts).
    """

    i_chunk: int
    h_chunk: int


def plan(shape: MoEShape, fmt: Format, threads: int) -> MoEPlan:
    """The default cut: as long as balance allows, up to 4 MiB.

    ``topk`` experts are assumed active, as in a decode step: more of them only make more tasks.
    """
    i_blocks = padded(shape.I, 1)[0] // N_BLOCK
    h_blocks = padded(shape.H, 1)[0] // N_BLOCK
    wanted = _TASKS_PER_THREAD * threads

    def chunk(blocks: int, units: int, block_bytes: int) -> int:
        balanced = max(1, blocks * units // wanted)
        return min(balanced, -(-_TASK_BYTES // block_bytes), blocks)

    return MoEPlan(
        i_chunk=chunk(i_blocks, shape.topk, 2 * fmt.block_bytes(shape.H)),
        h_chunk=chunk(h_blocks, 1, shape.topk * fmt.block_bytes(shape.I)),
    )
