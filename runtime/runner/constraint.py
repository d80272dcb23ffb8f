"""What an output may be, token by token: structured output, whatever decides it."""

from __future__ import annotations

from collections.abc import Collection
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

    Args:
        banned: tokens that ``logit_bias`` keeps from coming.
        ends: tokens that must not be among the first ``min_tokens``.

    Attributes:
        mask: int32 [ceil(vocab_size / 32)], as ``TokenFilter.allowed`` writes it. It never moves: a
            kernel may keep its address as long as the output lives.

    Raises:
        PykernelsError: no token may come next, by the constraint alone or with what else excludes
            some.
    """

    def __init__(
        self,
        constraint: Constraint,
        vocab_size: int,
        banned: Collection[int] = (),
        ends: Collection[int] = (),
        min_tokens: int = 0,
    ) -> None:
        self._filter = constraint.begin()
        self._vocab_size, self._banned = vocab_size, frozenset(banned)
        self._min_tokens, self._accepted = min_tokens, 0
        self._left = self._without(self._banned)
        self._left_early = self._without(self._banned.union(ends))
        self.mask: Mask = np.zeros(-(-vocab_size // 32), np.int32)
        self._write()

    def accept(self, token: int) -> None:
        """The output goes on with this token."""
        self._filter.accept(token)
        self._accepted += 1
        self.mask[:] = 0
        self._write()

    def _without(self, tokens: Collection[int]) -> Mask:
        """A mask of all tokens of the vocabulary but these."""
        bits = np.zeros(32 * -(-self._vocab_size // 32), np.uint8)
        bits[: self._vocab_size] = 1
        bits[list(tokens)] = 0
        return np.packbits(bits, bitorder="little").view(np.int32)

    @property
    def _is_early(self) -> bool:
        return self._accepted < self._min_tokens

    def _write(self) -> None:
        self._filter.allowed(self.mask)
        if not (self.mask & (self._left_early if self._is_early else self._left)).any():
            raise self._no_token()

    def _no_token(self) -> PykernelsError:
        bits = np.unpackbits(self.mask.view(np.uint8), bitorder="little")[: self._vocab_size]
        allowed = np.flatnonzero(bits).tolist()
        if not allowed:
            return PykernelsError(
                "The constraint lets no token come next",
                "It must allow an end token where it allows nothing else",
            )
        told = ", ".join(map(str, allowed[:3])) + (", ..." if len(allowed) > 3 else "")
        by = [] if self._banned.isdisjoint(allowed) else ["logit_bias"]
        if not self._banned.issuperset(allowed):  # others end the output, and it is early
            by.append(f"min_tokens={self._min_tokens}")
        return PykernelsError(
            f"The constraint allows only tokens that {' or '.join(by)} excludes: {told}",
            "Let another token come, or leave out what excludes these",
        )
