"""Drafts: tokens that may come next, all of which one step checks (Leviathan et al., ICML 2023).

A step computes a sequence's last token and its drafts, and draws a token behind each, as it would
behind the same tokens without drafts: random numbers go by a sequence's seed and the number of the
token. So drafts are accepted as far as they are what was drawn, one token more comes with them, and
the text is the same with any drafts and with none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pykernels.errors import PykernelsError

from ...kv_cache import BlockManager
from ...runner.batch import Runner
from ..requests.request import Request
from .config import check_drafts


class Drafts:
    """Which drafts the sequences of a step have.

    Args:
        most: of a sequence in a step.

    Raises:
        PykernelsError: a step of the runner has no room for so many, or cannot take them back.
    """

    def __init__(self, most: int, runner: Runner, manager: BlockManager) -> None:
        self._most, self._vocab_size, self._manager = most, runner.vocab_size, manager
        if not runner.takes_drafts:
            raise PykernelsError(
                "drafts for a model whose layers keep a state, from which no token can be taken"
                " back",
                "Leave draft at off",
            )
        check_drafts(most, runner)

    def propose(self, decoding: Iterable[Request]) -> dict[Request, list[int]]:
        """What the drafters say, of those that say anything."""
        found = ((request, self._proposed(request)) for request in decoding)
        return {request: drafts for request, drafts in found if drafts}

    def _proposed(self, request: Request) -> list[int]:
        most = min(self._most, request.most_drafts)
        if request.drafter is None or most <= 0:
            return []
        drafts = list(request.drafter.propose(request.tokens, most)[:most])
        for i, token in enumerate(drafts):
            if not 0 <= token < self._vocab_size:  # it is never drawn, nor is what follows
                return drafts[:i]
        return drafts

    def fitting(
        self, decoding: Sequence[Request], proposed: dict[Request, list[int]], rows: int
    ) -> dict[Request, list[int]]:
        """What fits of the drafts, with pages for them.

        Args:
            decoding: all requests that decode in the step, each with a page for its token.
            rows: drafts of the step, at most.
        """
        page_size, fits = self._manager.page_size, dict[Request, list[int]]()
        for request in decoding:
            drafts = proposed.get(request, [])[: max(0, rows)]
            places = len(request.table.pages) * page_size - request.computed - 1
            # One page must be left for each of the others: drafts preempt nobody.
            while places < len(drafts) and self._manager.available > len(decoding):
                self._manager.extend(request.table)
                places += page_size
            if drafts := drafts[:places]:
                fits[request] = drafts
                rows -= len(drafts)
        return fits
