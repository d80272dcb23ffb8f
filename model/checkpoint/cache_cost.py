"""What a KV cache takes, where layers with a window keep less than the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from runtime.kv_cache.layout import PAGE

_MOST = 16
"""Where all layers have a window, pages cost nothing but their records on the host."""


def _whole(pages: int) -> int:
    return 0


@dataclass(frozen=True)
class CacheCost:
    """Bytes of a KV cache by its pages.

    Attributes:
        token: bytes of a token in all layers; ``windowed``: those of them in layers with a window.
        pool: pages of these layers beside so many of the others; 0: as many.
    """

    token: int
    windowed: int = 0
    pool: Callable[[int], int] = _whole

    def times(self, factor: float) -> CacheCost:
        """Returns the cost of ``factor`` times as many layers."""
        token, windowed = (round(n * factor) for n in (self.token, self.windowed))
        return CacheCost(token, windowed, self.pool)

    def nbytes(self, pages: int) -> int:
        """Bytes of so many pages."""
        given_back = pages - (self.pool(pages) or pages)
        return PAGE * (pages * max(self.token, 1) - given_back * self.windowed)

    def of_token(self, pages: int) -> int:
        """Bytes of a token where there are so many pages, rounded up."""
        return -(-self.nbytes(pages) // (pages * PAGE))

    def most_pages(self, nbytes: int) -> int:
        """Pages that fit; no more than ``_MOST`` times as many as without windows."""
        fit = max(0, nbytes) // (PAGE * max(self.token, 1))
        most = _MOST * fit
        while 0 < fit < most and self.nbytes(2 * fit) <= nbytes:
            fit *= 2
        step = fit if fit < most else 1
        while step := step // 2:
            fit += step if self.nbytes(fit + step) <= nbytes else 0
        return fit

    def most_sequences(self, nbytes: int, longest: int) -> int:
        """Sequences of so many tokens that fit."""
        whole = max(0, nbytes) // (max(self.token, 1) * longest)
        return (
            max(whole, self.most_pages(nbytes) // -(-longest // PAGE)) if self.windowed else whole
        )
