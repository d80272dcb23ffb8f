"""Whether layers with a window have pages of their own, and how many."""

from __future__ import annotations

from ..kv_cache.layout import PAGE
from ..kv_cache.windows import pool_pages
from .lowerable import Lowerable


def window_pages(
    model: Lowerable, pages: int, sequences: int, step_tokens: int | None, device: str
) -> int:
    """Pages of layers with a window; 0: they have as many as the others. So it is where no layer
    has a window, where a prefix ends at a snapshot of states, on several GPUs, between which pages
    of all layers cross, and where a pool of their own would save nothing.

    Args:
        pages: of the other layers; ``sequences``: that may run at once.
        step_tokens: budget of a step; None: it is not chosen yet.
        device: one, or the GPUs.
    """
    if model.states or "," in device:
        return 0
    return pool_pages(pages, model.window, sequences, step_tokens, PAGE)
