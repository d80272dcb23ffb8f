"""What an output may be, token by token: structured output, whatever decides it."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pykernels.errors import PykernelsError

Mask = NDArray[np.int32]


class TokenFilter(Protocol):
    """Which tokens may come next in one output."""

    def allowed(self, mask: Mask) -> None:
        """Writes which tokens may come next, at least one.

        Args:
            mask: int32 [ceil(vocab_size / 32)], all zero; token v is bit v % 32 of word v // 32.
        """
        ...

    def accept(self, token: int) -> None:
        """The output goes on with this token. Called for each but one that ends the output."""
        ...


class Constraint(Protocol):
    """What the outputs of a request may be."""

    def begin(self) -> TokenFilter:
        """The filter of one output, before its first token."""
        ...


class MaskedOutput:
    """The mask of one output, from its first token on.

    Attributes:
        mask: int32 [ceil(vocab_size / 32)], as ``TokenFilter.allowed`` writes it. It never moves: a
            kernel may keep its address as long as the output lives.

    Raises:
        PykernelsError: no token may come next.
    """

    def __init__(self, constraint: Constraint, vocab_size: int) -> None:
        self._filter = constraint.begin()
        self.mask: Mask = np.zeros(-(-vocab_size // 32), np.int32)
        self._write()

    def accept(self, token: int) -> None:
        """The output goes on with this token."""
        self._filter.accept(token)
        self.mask[:] = 0
        self._write()

    def _write(self) -> None:
        self._filter.allowed(self.mask)
        if not self.mask.any():
            raise PykernelsError(
                "The constraint lets no token come next",
                "It must allow an end token where it allows nothing else",
            )
