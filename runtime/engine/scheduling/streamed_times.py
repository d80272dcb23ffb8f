"""What steps of streamed prompts take, by their tokens, and what follows for who waits for them."""

from __future__ import annotations

CHUNK_SECONDS = 1.0
"""A chunk of a prompt takes so long at most while others wait."""
_CROSSINGS = 2
"""Unless that is less than so many times what its experts take to cross: smaller chunks would cost
the long prompt more than they give to others."""
_BOUND = 1.5
"""Steps that take longer than the crossing, by so many times, are bound by their tokens."""


class StreamedTimes:
    """Learns from each step what a token costs.

    A step takes as long as all experts take to cross, or as its tokens take to be computed, which
    grows with the context: the last step says how long that is.

    Args:
        least_seconds: in which all experts cross; 0: nobody knows, and nothing is concluded.
    """

    def __init__(self, least_seconds: float) -> None:
        self._least = least_seconds
        self._token = 0.0  # seconds; 0: no step was bound by its tokens

    def record(self, tokens: int, seconds: float) -> None:
        """A step of so many tokens has taken so long."""
        if seconds > _BOUND * self._least > 0:
            self._token = seconds / tokens
        else:  # they take no longer than this, and perhaps far less
            self._token = min(self._token, seconds / tokens)

    def most_tokens(self) -> int:
        """Most tokens of a step while others wait; no limit where nothing is known."""
        seconds = max(CHUNK_SECONDS, _CROSSINGS * self._least)
        return int(seconds / self._token) if self._token else 1 << 62

    def may_split(self, tokens: int) -> bool:
        """Whether a step of so many takes about as long as two of half of them."""
        return self._token > 0 and self._token * tokens >= _CROSSINGS * self._least

    def beside(self, least: int) -> int:
        """Prompts of fewer tokens are done on the other runner in ``CHUNK_SECONDS``, or are to be
        there anyway.

        Args:
            least: tokens that take the other runner about as long as all experts take to cross.
        """
        if not self._least:
            return least
        return max(least, int(least * CHUNK_SECONDS / self._least))
