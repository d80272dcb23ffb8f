"""How a call is cut into tasks: data, from shapes alone, for a test or a notebook to change."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import PykernelsError
from ...quant import Format
from ...quant.layout import N_BLOCK, padded
from ...registry import get_backend, load
from ...shapes import MoEShape
from ...target import detect
from ..gemm.common import MAX_BLOCKS

# Tasks a thread. Every task begins streams that the prefetchers have to find again: the longer the
# better. A GEMM task reads all its expert's tokens, so there too it pays to take more outputs.
_GATE_UP_TASKS, _GEMM_TASKS = 16, 6
# Where a call ends, threads must run dry together: a down task is a third of what is left for its
# thread. Against four equal tasks a thread, one token is 1.04 to 1.08 times as fast on 16 threads.
_DOWN_SHARE = 3
# With many tokens an expert, such tasks would each read all tokens of all experts, 100 times over
# on 16 threads, for ever fewer outputs. There the runs of outputs are long, and each is split by
# experts instead.
_RUNS, _SPLITS = 2, 8
_TASK_BYTES = 8 << 20  # longer runs gain nothing

GEMM_FROM = 5
"""Tokens of an expert from which its weights go through the GEMM by default: more than four
(SOSP'25 Figure 7)."""

_COMPUTE_BOUND = 5  # tokens of an expert from which products take longer than reading its weights


@dataclass(frozen=True)
class MoEPlan:
    """The cut of one call.

    Attributes:
        i_chunk: 32-row blocks of the intermediate size in a gate-up task (of one expert).
        h_chunk: 32-row blocks of the hidden size in a down task (of all active experts), at most.
        gemm_from: tokens of an expert from which its weights go through the GEMM.
        h_share: a down task takes one in so many of the blocks that are left, ``h_chunk`` at most;
            0: always ``h_chunk``.
        down_splits: tasks that a run of blocks is split into by its active experts. Each adds to
            the sums of the one before, so it waits for that.

    Raises:
        PykernelsError: a number that no call could be cut by.
    """

    i_chunk: int
    h_chunk: int
    gemm_from: int = GEMM_FROM
    h_share: int = 0
    down_splits: int = 1

    def __post_init__(self) -> None:
        counts = self.i_chunk, self.h_chunk, self.gemm_from, self.down_splits
        if min(counts) < 1 or self.h_share < 0:
            raise PykernelsError(
                f"a call cannot be cut by {self}",
                "Use numbers from 1; h_share may be 0",
            )

    def down_cuts(self, blocks: int) -> list[int]:
        """Where runs of blocks begin, and the end: long ones first, short ones when the call ends.

        Threads run dry within one short task of each other, though most bytes are read in long
        ones (guided self-scheduling, Polychronopoulos and Kuck 1987).
        """
        cuts = [0]
        while (left := blocks - cuts[-1]) > 0:
            share = -(-left // self.h_share) if self.h_share else left
            cuts.append(cuts[-1] + min(share, self.h_chunk, left))
        return cuts


def gemm_from_here(backend: str, fmt: str, activations: str = "bf16") -> int | None:
    """``MoEPlan.gemm_from`` on this CPU without a calibration; None for a backend without a
    GEMM."""
    gemm_from = get_backend(backend).gemm_from
    return load(gemm_from)(fmt, activations, detect()) if gemm_from else None


def plan(
    shape: MoEShape, fmt: Format, threads: int, T: int = 1, gemm_from: int = GEMM_FROM
) -> MoEPlan:
    """The default cut: as long as balance allows, up to 8 MiB of weights.

    Args:
        threads: that share the tasks.
        T: tokens of the call; ``min(E, T * topk)`` experts are taken to be active.
        gemm_from: as in ``MoEPlan``; what this machine was calibrated to.
    """
    i_blocks = padded(shape.I, 1)[0] // N_BLOCK
    h_blocks = padded(shape.H, 1)[0] // N_BLOCK
    active = min(shape.E, T * shape.topk)
    if T * shape.topk >= min(gemm_from, _COMPUTE_BOUND) * active:
        return MoEPlan(
            i_chunk=min(MAX_BLOCKS // 2, _chunk(i_blocks * active, _GEMM_TASKS * threads)),
            h_chunk=min(MAX_BLOCKS, _chunk(h_blocks, _RUNS * threads)),
            gemm_from=gemm_from,
            down_splits=max(1, min(_SPLITS, active)),
        )
    longest = max(1, _TASK_BYTES // (2 * fmt.block_bytes(shape.H)))
    return MoEPlan(
        i_chunk=min(i_blocks, longest, _chunk(i_blocks * active, _GATE_UP_TASKS * threads)),
        h_chunk=h_blocks,
        gemm_from=gemm_from,
        h_share=_DOWN_SHARE * threads,
    )


def _chunk(blocks: int, tasks: int) -> int:
    """Blocks of a task, so that there are about so many."""
    return max(1, -(-blocks // tasks))
