"""What may come next in an output: drafts, which a step checks all at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol


class Drafter(Protocol):
    """Says what may come next in one output. The engine's thread calls it."""

    def propose(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        """Drafts of the tokens that follow.

        Args:
            tokens: of the prompt and the output so far, not to be changed; those of the last call,
                and more.
            most: drafts that may be used; more are not looked at.
        """
        ...


MakeDrafter = Callable[[], Drafter]
"""Makes the drafter of one output."""


AT_ONCE = 4096
"""Tokens of a prompt that are looked at in a step, so that none waits long for it: a millisecond or
two."""


class PromptLookup:
    """What came behind the same tokens before, in the prompt or the output (prompt lookup decoding,
    Saxena 2023). Where that is the end of the text, it repeats itself.

    Args:
        size: tokens that must be the same.
    """

    def __init__(self, size: int = 3) -> None:
        self._size, self._seen = size, size
        self._behind: dict[tuple[int, ...], int] = {}  # the last place behind these tokens

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """See ``Drafter``."""
        size, end = self._size, len(tokens)
        last = max(self._seen, min(end, self._seen + AT_ONCE))
        for place in range(self._seen, last):
            self._behind[tuple(tokens[place - size : place])] = place
        self._seen = last
        place = self._behind.get(tuple(tokens[-size:]), end)
        return [tokens[place + i % (end - place)] for i in range(most)] if place < end else []
