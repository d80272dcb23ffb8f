"""Drafts: tokens that may come next, all of which one step checks (Leviathan et al., ICML 2023).

A step computes a sequence's last token and its drafts, and draws a token behind each, as it would
behind the same tokens without drafts: random numbers go by a sequence's seed and the number of the
token. So drafts are accepted as far as they are what was drawn, one token more comes with them, and
the text is the same with any drafts and with none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from ..requests.request import Request


class Drafter(Protocol):
    """Says what may come next in a sequence. The engine's thread calls it."""

    def propose(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        """Drafts of the tokens that follow.

        Args:
            tokens: of the prompt and the output so far; not to be changed.
            most: drafts that may be used; more are not looked at.
        """
        ...


class Drafts:
    """What a drafter proposes for the requests of a step.

    Args:
        vocab_size: token ids are below.
    """

    def __init__(self, drafter: Drafter, vocab_size: int) -> None:
        self._drafter, self._vocab_size = drafter, vocab_size

    def propose(self, decoding: Iterable[Request]) -> dict[Request, list[int]]:
        """The drafts of those that have any."""
        found = ((request, self._drafts(request)) for request in decoding)
        return {request: drafts for request, drafts in found if drafts}

    def _drafts(self, request: Request) -> list[int]:
        most = request.most_drafts
        if most <= 0:
            return []
        drafts = list(self._drafter.propose(request.tokens, most)[:most])
        for i, token in enumerate(drafts):
            if not 0 <= token < self._vocab_size:  # it is never drawn, nor is what follows
                return drafts[:i]
        return drafts
