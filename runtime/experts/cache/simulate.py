"""What a cache of experts would have hit: the engine's own one over recorded choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .cache import CacheStats, Chosen, ExpertCache
from .policy import CachePolicy


@dataclass(frozen=True)
class Recording:
    """What the routers chose for one sequence.

    Attributes:
        ids: [tokens, L, topk]; negative: none.
        prompt: how many of the tokens are the prompt's, one step; each other one is a step.
    """

    ids: NDArray[np.int32]
    prompt: int


def simulate(
    recordings: Sequence[Recording], experts: int, slots: int, policy: CachePolicy
) -> CacheStats:
    """Runs sequences one after the other; a slot is filled while one step runs.

    Args:
        experts: of a layer; ``slots``: of each layer.

    Returns:
        Counts of the decode steps.
    """
    L = recordings[0].ids.shape[1]
    cache = ExpertCache([slots] * L, experts, policy)
    for one in recordings:
        begin = 0
        for end in (one.prompt, *range(one.prompt + 1, len(one.ids) + 1)):
            cache.before_step()
            cache.plan()  # while the step runs
            step, begin = one.ids[begin:end], end
            chosen = (Chosen(layer, step[:, layer]) for layer in range(L))
            cache.count(chosen, len(step), end > one.prompt)
    return cache.stats


def best_fixed(recordings: Sequence[Recording], experts: int, slots: int) -> float:
    """The part of the decode steps' choices that the most used experts of each layer would have
    had, had they been known: no slots that stay as they are hit more."""
    ids = np.concatenate([one.ids[one.prompt :] for one in recordings])
    hits = total = 0
    for layer in range(ids.shape[1]):
        flat = ids[:, layer].ravel()
        counts = np.sort(np.bincount(flat[flat >= 0], minlength=experts))[::-1]
        hits, total = hits + int(counts[:slots].sum()), total + int(counts.sum())
    return hits / max(1, total)
