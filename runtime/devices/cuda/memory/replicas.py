"""Keys and values that several GPUs have, page by page.

The first GPU's pages are the engine's. Another GPU has a copy of each in a cache of its own, which
is out of date where something wrote to the first one's: it is brought before a step that reads it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack

import numpy as np
import torch

from ....kv_cache.layout import PAGE
from ....kv_cache.page_store import Kind, parts_of
from ....runner.batch import Ints

Caches = Mapping[str, torch.Tensor]


class Replicas:
    """The caches of all GPUs.

    Args:
        first: the first GPU's, by name; ``others``: by GPU, likewise and in the same order.
        pages: of each.
    """

    def __init__(self, first: Caches, others: Mapping[str, Caches], pages: int) -> None:
        self._first = parts_of(first, ())[Kind.PAGE]
        self._others = {gpu: parts_of(own, ())[Kind.PAGE] for gpu, own in others.items()}
        self._stale = {gpu: np.ones(pages, np.bool_) for gpu in others}
        # Not the stream of decode steps, behind which copies would wait.
        device = self._first[0].device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def written(self, slots: Ints, on: Collection[str] = ()) -> None:
        """Says that a step has written to these slots, on the first GPU and on others.

        Args:
            slots: page * PAGE + offset; -1: none. On the others these pages have been brought.
        """
        pages = slots[slots >= 0] // PAGE
        for gpu, stale in self._stale.items():
            stale[pages] = gpu not in on

    def overwritten(self, page: int) -> None:
        """Says that the first GPU's page has become another one."""
        for stale in self._stale.values():
            stale[page] = True

    def bring(self, pages: Ints, gpus: Collection[str]) -> None:
        """Copies those of the pages to GPUs that are out of date there, in the streams that are
        current there."""
        for gpu in gpus:
            if gpu not in self._others:
                continue
            stale = self._stale[gpu]
            if len(missing := pages[stale[pages]]):
                stale[missing] = False
                self._copy(self._first, self._others[gpu], missing)

    def give_back(self, pages: Ints, gpu: str) -> torch.cuda.Event | None:
        """Copies pages from a GPU to the first one, behind what is in its current stream.

        Returns:
            What is recorded when they are there; None: they are.
        """
        self._copy(self._others[gpu], self._first, pages)
        return self._stream.record_event() if self._stream is not None else None

    # Where the model was loaded in it, tensors can be changed in it only.
    @torch.inference_mode()
    def _copy(
        self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], pages: Ints
    ) -> None:
        numbers = torch.from_numpy(pages)
        with ExitStack() as around:
            if self._stream is not None:
                around.enter_context(torch.cuda.stream(self._stream))
            here, there = (numbers.to(parts[0].device) for parts in (sources, targets))
            for source, target in zip(sources, targets, strict=True):
                rows = source.index_select(0, here)
                target.index_copy_(0, there, rows.to(target.device, non_blocking=True))


def pages_before(batch_tables: Ints, rows: Ints, lengths: Ints) -> Ints:
    """The pages of sequences' first positions, each once.

    Args:
        batch_tables: [rows, pages]; ``rows``: [S], of each sequence; ``lengths``: [S] positions.
    """
    runs = [batch_tables[row, : -(-n // PAGE)] for row, n in zip(rows, lengths, strict=True)]
    return np.unique(np.concatenate(runs)) if runs else np.zeros(0, np.int64)
