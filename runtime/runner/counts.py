"""Which tokens a sequence has seen, and how often: what penalties need."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class TokenCounts:
    """Distinct tokens of one sequence, in the order in which they came.

    The arrays never move: a kernel may keep their addresses as long as the sequence lives.

    Args:
        prompt: its tokens.
        max_new_tokens: most tokens that will be added.
        vocab_size: token ids are below.

    Attributes:
        size: N, distinct tokens so far.
        ids: int32 [capacity]; the first N are valid, as below.
        counts: int32 [capacity], occurrences in the output; 0: in the prompt only.
    """

    __slots__ = ("_index", "counts", "ids", "size")

    def __init__(self, prompt: Sequence[int], max_new_tokens: int, vocab_size: int) -> None:
        distinct = list(dict.fromkeys(prompt))
        capacity = min(vocab_size, len(distinct) + max_new_tokens)
        self.size = len(distinct)
        self.ids = np.zeros(capacity, np.int32)
        self.counts = np.zeros(capacity, np.int32)
        self.ids[: self.size] = distinct
        self._index = {token: i for i, token in enumerate(distinct)}

    def add(self, token: int) -> None:
        """Count one more token of the output."""
        at = self._index.get(token)
        if at is None:
            at = self._index[token] = self.size
            self.ids[at] = token
            self.size += 1
        self.counts[at] += 1
