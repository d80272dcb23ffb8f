"""The order in which passes may rewrite a program, and which exclude each other: two tables.

A program names the passes that have rewritten it (``Program.passes``). A pass that comes too late,
or with one that does the same thing in another way, is refused in one line that names both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec

from pykernels.errors import PykernelsError

from ..program import Program

P = ParamSpec("P")

ONE_OF: tuple[tuple[str, ...], ...] = (
    ("gpu_experts", "expert_cache", "split_experts"),  # a layer's choice is parted by one table
    ("stream_weights", "split_experts"),  # all experts cross, or a part of them
    ("dual_batch",),
    ("stream_dense",),
    ("split_over_nodes",),
    ("gpu_metadata",),
    ("attend_on_cpu",),
    ("offload_kv",),
)
"""A program goes through at most one pass of each row, and through that one once."""

NOT_AFTER: dict[str, tuple[str, ...]] = {
    # The smallest weights would be those of the experts that are not deferred, or in no slot.
    "skip": ("defer", "gpu_experts", "expert_cache", "split_experts", "dual_batch", "gpu_metadata"),
    # Each microbatch would have its own. What a GPU's kernels read belongs to a program as it is.
    "defer": ("dual_batch", "gpu_metadata"),
    # What crosses is computed where its router is, wherever its node was before.
    "offload": ("stream_weights", "split_experts", "dual_batch"),
    "gpu_experts": ("defer", "stream_weights", "dual_batch", "gpu_metadata"),
    "expert_cache": ("defer", "stream_weights", "dual_batch", "gpu_metadata"),
    "split_experts": ("defer", "dual_batch", "gpu_metadata"),
    # A deferred expert would cross a second time; a slice on a NUMA node is no expert.
    "stream_weights": ("defer", "dual_batch", "split_over_nodes", "gpu_metadata"),
    # A rank has experts of its own, wherever they lie then.
    "shard": ("gpu_experts", "expert_cache", "split_experts", "stream_weights"),
    # A microbatch's attention reads inputs that the CPU has not.
    "attend_on_cpu": ("dual_batch", "gpu_metadata"),
    # Experts are streamed for prompts, whose steps have no microbatches.
    "dual_batch": ("stream_weights", "split_experts", "gpu_metadata"),
}
"""Passes, by pass, after which it would do something else than it says."""


def ordered(
    rewrite: Callable[Concatenate[Program, P], Program],
) -> Callable[Concatenate[Program, P], Program]:
    """The pass, which refuses a program by the tables above, and writes its name into those that it
    changes.

    The wrapped pass raises PykernelsError.
    """
    name = rewrite.__name__

    @functools.wraps(rewrite)
    def apply(program: Program, *args: P.args, **kwargs: P.kwargs) -> Program:
        if fault := out_of_order(name, program.passes):
            raise PykernelsError(f"{program.name!r}: {fault[0]}", fault[1])
        rewritten = rewrite(program, *args, **kwargs)
        return rewritten if rewritten is program else rewritten.rewritten_by(name)

    return apply


def out_of_order(name: str, before: tuple[str, ...]) -> tuple[str, str] | None:
    """Why a pass must not come after others, and what to do."""
    for row in ONE_OF:
        for other in before:
            if name in row and other in row:
                several = len(row) > 1
                hint = f"Apply one of {', '.join(row)}, once" if several else "Apply it once"
                return f"{name} after {other}", hint
    for other in NOT_AFTER.get(name, ()):
        if other in before:
            return f"{name} after {other} would do something else", f"Apply {name} before {other}"
    return None
