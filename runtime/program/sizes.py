"""The sizes for which a model is lowered."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class StepSizes:
    """The most that a step may have, and the cache that it reads.

    Attributes:
        tokens: T; ``sequences``: S; ``logits``: R, the rows of logits.
        pages: of the cache; ``table_pages``: of one sequence.
        state_slots: states of sequences, snapshots of them included, where layers have states.
    """

    tokens: int = 1
    sequences: int = 1
    logits: int = 1
    pages: int = 1
    table_pages: int = 1
    state_slots: int = 1

    def of(self, tokens: int) -> StepSizes:
        """The sizes of a step of fewer tokens, which has as many rows of logits at most."""
        return replace(self, tokens=tokens, logits=min(tokens, self.logits))


ONE_TOKEN = StepSizes()
"""For what is the same in every program of a model: its nodes and weights."""
