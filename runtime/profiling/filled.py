"""Contexts that nobody has computed: random keys, values and states, as if prompts had been read.

A decode step takes as long on these as on any other ones, and a context of 131,072 tokens is there
in a second, where reading such a prompt takes minutes. What is drawn then means nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pykernels.errors import PykernelsError

from ..kv_cache import BlockManager
from ..kv_cache.prefix import PageKey, extend_keys
from ..runner.paged_runner import PagedRunner

_SCALE = 0.01
"""Scales of numbers in FP8, of which the largest is 448."""


# Where the model was loaded in it, tensors can be changed in it only.
@torch.inference_mode()
def fill_context(runner: PagedRunner, manager: BlockManager, tokens: Sequence[int]) -> None:
    """Puts a prompt's full pages into the cache, filled with random numbers, and of layers with
    states one behind them: a request for it reads its last page alone.

    Args:
        runner: bound to the engine whose ``manager`` it is, while no step runs.

    Raises:
        PykernelsError: the cache has no room for them.
    """
    full = manager.shareable(tokens, None)
    keys: list[PageKey] = []
    extend_keys(keys, tokens, full, manager.page_size)
    pages = manager.reserve([], full, 0)
    if pages is None:
        raise PykernelsError(
            f"no room for a context of {len(tokens)} tokens", "Give the runner more pages"
        )
    for name in runner.model.caches(1):
        if name not in runner.model.states:
            _fill(runner.caches[name], name, pages)
    node = manager.adopt([], keys, pages, full)
    if manager.snapshots is not None and node is not None:
        slot = manager.snapshots.states.take()
        for name in runner.model.states:
            _fill(runner.caches[name], name, [slot])
        manager.snapshots.states.keep(node, slot)
    if runner.device.type == "cuda":
        torch.cuda.synchronize(runner.device)


def _fill(cache: torch.Tensor, name: str, places: Sequence[int]) -> None:
    """Writes one page's random numbers to all of these pages or slots."""
    one = cache[0]
    if name.endswith("_scale"):
        data = torch.full(one.shape, _SCALE, dtype=torch.float32, device=cache.device)
    else:
        data = torch.randn(one.shape, dtype=torch.float32, device=cache.device)
    row = data.to(cache.dtype).reshape(1, -1).view(torch.uint8)
    at = torch.tensor(places, dtype=torch.int64, device=cache.device)
    cache.flatten(1).view(torch.uint8)[at] = row
