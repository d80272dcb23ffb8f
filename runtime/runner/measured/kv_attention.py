"""What a decode step takes over a long context, measured on a runner's own steps."""

from __future__ import annotations

import time
from collections.abc import Mapping
from statistics import median

import torch

from ...kv_cache.layout import PAGE
from ...planning.config import LONG
from ...program.step_inputs import HAS_STATE, IS_PROMPT, STATE_SLOTS
from ..paged_runner import Executable

_ROUNDS = 5
_FIRST = {"query_starts": 0, "query_lengths": 1, "page_rows": 0, STATE_SLOTS: 0, HAS_STATE: 0}
_CHANGED = ("tokens", "positions", "slot_mapping", "sequences", "lengths", "page_table", IS_PROMPT)


def context_of(positions: int, pages: int) -> int:
    """The context over which steps are timed: what is read takes longer than all else there.

    Args:
        positions: of the longest sequence; ``pages``: of the cache.
    """
    return min(LONG, positions, pages * PAGE)


def decode_seconds(
    step: Executable, arrays: Mapping[str, torch.Tensor], sizes: torch.Tensor, context: int
) -> float:
    """Seconds of a step of one token that attends to the cache's first places, the median of a
    few; whatever is there.

    Args:
        arrays: inputs of the step, which are as before when it returns; ``sizes``: of it.
    """
    before = {name: arrays[name].clone() for name in (*_CHANGED, *_FIRST)}
    for name in ("positions", "slot_mapping"):
        arrays[name][0] = context - 1
    arrays["tokens"][0] = arrays["sequences"][0] = arrays[IS_PROMPT][0] = 0
    arrays["lengths"][0] = context
    for name, value in _FIRST.items():
        arrays[name][0] = value
    pages = -(-context // PAGE)
    arrays["page_table"][0, :pages] = torch.arange(pages, dtype=torch.int64, device="cpu")
    sizes[0], sizes[1], sizes[2] = 1, 1, 0
    times = list[float]()
    for _ in range(1 + _ROUNDS):
        start = time.perf_counter()
        step.run()
        times.append(time.perf_counter() - start)
    for name, array in before.items():
        arrays[name].copy_(array)
    return median(times[1:])
