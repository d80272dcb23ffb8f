"""Chunks of prompts: which tokens of which prompts are in a step (Sarathi-Serve, OSDI 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...kv_cache import BlockManager
from ..requests.request import Request
from .step import PrefillChunk


@dataclass(frozen=True)
class Chunks:
    """Deals the tokens of a step to prompts.

    Attributes:
        most_partial: prompts of a step that do not end in it, at most.
    """

    manager: BlockManager
    most_partial: int

    def of(
        self, prefilling: Sequence[Request], budget: int, rows: int, most: int
    ) -> list[PrefillChunk]:
        """Those of a step; those that end their prompt come first.

        A long prompt that leads leaves half to short ones; what these do not need goes to all by
        order.

        Args:
            prefilling: the prompts, by order.
            budget: tokens of the step, at most; ``rows``: of logits.
            most: tokens of a prompt that is short.
        """
        ends: dict[Request, int] = {}  # the next token of each
        short = [r for r in prefilling if r.left <= most]
        mixed = bool(short) and prefilling[0].left > most
        turns = [(short, budget // 2)] if mixed else []
        for requests, share in [*turns, (prefilling, budget)]:
            left = min(share, budget)
            for request in requests:
                start = ends.get(request, request.computed)
                # Every token from the first row on needs a row of logits.
                first_row = max(start, request.first_row)
                end = min(start + left, len(request.tokens), first_row + rows)
                if (mark := self.manager.chunk_end(request.table)) is not None:
                    end = min(end, mark)
                if end > start:
                    end = self.manager.reach(request.table, end)
                if end <= start:
                    continue
                ends[request] = end
                left -= end - start
                budget -= end - start
                rows -= max(0, end - first_row)
                partial = sum(e < len(r.tokens) for r, e in ends.items())
                if partial >= self.most_partial:
                    break
        chunks = [PrefillChunk(r, r.computed, end - r.computed) for r, end in ends.items()]
        return sorted(chunks, key=lambda chunk: (not chunk.completes, chunk.request.order))
