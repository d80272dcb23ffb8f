"""How often drafts of an output were right, of late: whether more are worth checking.

Drafts need not be checked to know that. Where no step checks them, what the drafter says is
compared with what is drawn anyway, while the next step runs. So it is known when drafts of an
output begin to be right, and nothing is paid for finding out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

KEPT = 0.9
"""What a draft counts once another one has been tried."""
DOUBT = 1.0
"""Wrong drafts that every output is taken to have had."""


class Acceptance:
    """How often drafts of one output were right, of late."""

    def __init__(self) -> None:
        self._right = self._checked = 0.0
        self._guess: Sequence[int] = ()
        self._at = 0  # where the guess begins in the text

    @property
    def rate(self) -> float:
        """The chance of a draft to be right, if all before it are."""
        return self._right / (self._checked + DOUBT)

    def add(self, right: int, drafts: int) -> None:
        """So many of so many drafts were right: those behind a wrong one were not tried."""
        self._guess = ()
        tried = min(right + 1, drafts)
        self._right = KEPT**tried * self._right + right
        self._checked = KEPT**tried * self._checked + tried

    def watch(self, tokens: Sequence[int], propose: Callable[[], Sequence[int]]) -> None:
        """Compares drafts that no step checks with what is drawn.

        Args:
            tokens: the text so far; ``propose``: drafts of what follows.
        """
        drawn = tokens[self._at : self._at + len(self._guess)]
        if self._guess and drawn:
            right = next((i for i, token in enumerate(drawn) if token != self._guess[i]), None)
            if right is not None or len(drawn) == len(self._guess):
                self.add(len(drawn) if right is None else right, len(self._guess))
        if not self._guess:
            self._guess, self._at = propose(), len(tokens)
