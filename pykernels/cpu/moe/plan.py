"""How a call is cut into tasks: data, from shapes alone, for a test or a notebook to change."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import PykernelsError
from ...quant import Format
from ...quant.layout import N_BLOCK, padded
from ...shapes import MoEShape
from ...target import detect
from ..gemm.common import MAX_BLOCKS
from ..isa import prefers_digits, prefers_fma
from ..weights.layout import INTEGERS

# Tasks a thread. Every task begins streams that the prefetchers have to find again: the longer the
# better. A GEMM task reads all its expert's tokens, so there too it pays to take more outputs.
_GATE_UP_TASKS, _GEMM_TASKS = 16, 6
# Where a call ends, threads must run dry together: a down task is a third of what is left for its
# thread. Against four like tasks a thread, one token is 1.04 to 1.08 times as fast on 16 threads.
_DOWN_SHARE = 3
# A crowded call's would each read all tokens of all experts, 100 times over on 16 threads, for ever
# fewer outputs. There the runs of outputs are long, and it is the experts that are cut short.
_RUNS, _LEGS = 2, 8
_TASK_BYTES = 8 << 20  # longer runs gain nothing
_ROW_TASKS, _LONGEST_ROWS = 4, 16
_DRIVER_VALUES = 1 << 17  # inputs that the driver copies about as soon as others could join in

GEMM_FROM = {"amx": 5, "avx512": 9}
"""Backends that have a GEMM beside their tiles, and the tokens of an expert from which it is taken
to win where nobody measured it: more than four on AMX (SOSP'25 Figure 7), more than a pass of tiles
takes on AVX-512."""
_FROM = GEMM_FROM["amx"]

# On AMX, as an Emerald Rapids calibrated it (bench/notes/cpu-gemm-amx.md): tiles that AMX
# helps, and int8 inputs, put the GEMM off. Up to these counts tiles take 0.45 to 0.99 of its time.
_LATER = {
    ("bf16", "bf16"): 9,
    ("fp8", "bf16"): 9,
    ("fp8-channel", "bf16"): 9,
    ("int4-g128", "bf16"): 9,
    ("int8", "bf16"): 12,
    ("int8-channel", "bf16"): 12,
    ("q8_0", "bf16"): 12,
    ("int8", "int8"): 10,
    ("int8-channel", "int8"): 9,
    ("int4", "int8"): 16,
    ("int4-g128", "int8"): 16,
    ("int4-channel", "int8"): 10,
    ("q6_k", "int8"): 16,
    ("q8_0", "int8"): 16,
    ("q4_k", "int8"): 24,
    ("q5_k", "int8"): 24,
}

# On AVX-512 where bfloat16 products are slow, as calibrated on an Emerald Rapids without AMX, two
# threads. Tiles of digits (``instructions.prefers_digits``) hold out against multiply-adds
# (``prefers_fma``) the longer the less often they fold: a tie within 4 % from 32 tokens on where
# groups are wide. bfloat16's hold out until reading no longer bounds them. With int8 inputs two
# passes of tiles still win.
_BYTES_FROM = 16
_FMA_FROM, _FMA_DIGITS_FROM = 5, 24
_FMA_LATER = {"bf16": 12, "q6_k": 12, "q5_k": 16} | dict.fromkeys(
    ("int8", "int8-channel", "int4-g128", "int4-channel"), 128
)

_CROWDED = 5  # tokens of an expert from which its time is that of products, not of reading weights


@dataclass(frozen=True)
class MoEPlan:
    """The cut of one call.

    Attributes:
        i_chunk: 32-row blocks of the intermediate size in a gate-up task (of one expert).
        h_chunk: 32-row blocks of the hidden size in a down task (of all active experts), at most.
        gemm_from: tokens of an expert from which its weights go through the GEMM.
        row_chunk: tokens whose inputs one task copies; 0: the driver copies all, before any task.
        h_share: a down task takes one in so many of the blocks that are left, ``h_chunk`` at most;
            0: always ``h_chunk``.
        h_legs: down tasks in which a run of blocks walks the active experts, one behind the other.

    Raises:
        PykernelsError: a number that no call could be cut by.
    """

    i_chunk: int
    h_chunk: int
    gemm_from: int = _FROM
    row_chunk: int = 0
    h_share: int = 0
    h_legs: int = 1

    def __post_init__(self) -> None:
        least = min(self.row_chunk, self.h_share)
        if min(self.i_chunk, self.h_chunk, self.gemm_from, self.h_legs) < 1 or least < 0:
            raise PykernelsError(
                f"a call cannot be cut by {self}",
                "Use numbers from 1; row_chunk and h_share may be 0",
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


def default_gemm_from(
    backend: str, fmt: str, activations: str = "bf16", digits: bool = False, fma: bool = False
) -> int | None:
    """``MoEPlan.gemm_from`` where nobody measured it; None for a backend without a GEMM.

    Args:
        digits: whether AVX-512 tiles take bf16 inputs as digits (``instructions.prefers_digits``).
        fma: whether the AVX-512 GEMM multiplies them in float32 (``instructions.prefers_fma``).
    """
    otherwise = GEMM_FROM.get(backend)
    if backend == "amx":
        return _LATER.get((fmt, activations), otherwise)
    if backend == "avx512" and digits and fmt in INTEGERS:
        return _FMA_LATER.get(fmt, _FMA_DIGITS_FROM) if activations == "bf16" else _BYTES_FROM
    if backend == "avx512" and fma and activations == "bf16":
        return _FMA_LATER.get(fmt, _FMA_FROM)
    return otherwise


def gemm_from_here(backend: str, fmt: str, activations: str = "bf16") -> int | None:
    """``default_gemm_from`` on this CPU."""
    digits, fma = prefers_digits(detect()), prefers_fma(detect())
    return default_gemm_from(backend, fmt, activations, digits, fma)


def plan(shape: MoEShape, fmt: Format, threads: int, T: int = 1, gemm_from: int = _FROM) -> MoEPlan:
    """The default cut: as long as balance allows, up to 8 MiB of weights.

    Args:
        threads: that share the tasks.
        T: tokens of the call; ``min(E, T * topk)`` experts are taken to be active.
        gemm_from: as in ``MoEPlan``; what this machine was calibrated to.
    """
    i_blocks = padded(shape.I, 1)[0] // N_BLOCK
    h_blocks = padded(shape.H, 1)[0] // N_BLOCK
    active = min(shape.E, T * shape.topk)
    row_chunk = 0
    if T * shape.H > _DRIVER_VALUES:
        row_chunk = min(_LONGEST_ROWS, _chunk(T, _ROW_TASKS * threads))
    crowded = T * shape.topk >= min(gemm_from, _CROWDED) * active
    if crowded:
        return MoEPlan(
            i_chunk=min(MAX_BLOCKS // 2, _chunk(i_blocks * active, _GEMM_TASKS * threads)),
            h_chunk=min(MAX_BLOCKS, _chunk(h_blocks, _RUNS * threads)),
            gemm_from=gemm_from,
            row_chunk=row_chunk,
            h_legs=max(1, min(_LEGS, active)),
        )
    longest = max(1, _TASK_BYTES // (2 * fmt.block_bytes(shape.H)))
    return MoEPlan(
        i_chunk=min(i_blocks, longest, _chunk(i_blocks * active, _GATE_UP_TASKS * threads)),
        h_chunk=h_blocks,
        gemm_from=gemm_from,
        row_chunk=row_chunk,
        h_share=_DOWN_SHARE * threads,
    )


def _chunk(blocks: int, tasks: int) -> int:
    """Blocks of a task, so that there are about so many."""
    return max(1, -(-blocks // tasks))
