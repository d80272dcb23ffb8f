"""The sizes for which a model is lowered, and those of the two microbatches of a decode step.

With dual batch (OSDI'26 3.3.1) each microbatch has half of a step's sequences. They have one token
each, so that the tokens of a microbatch are its sequences, too. Microbatch A has the first ones,
and one more if their number is odd.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class StepSizes:
    """The most that a step may have, and the cache that it reads.

    Attributes:
        tokens: T; ``sequences``: S; ``logits``: R, the rows of logits.
        pages: of the cache; ``table_pages``: of one sequence.
        state_slots: states of sequences, snapshots of them included, where layers have states.
        window_pages: of layers with a window, in a pool of their own; 0: they have ``pages``.
    """

    tokens: int = 1
    sequences: int = 1
    logits: int = 1
    pages: int = 1
    table_pages: int = 1
    state_slots: int = 1
    window_pages: int = 0

    @property
    def of_caches(self) -> tuple[int, int, int]:
        """What a model's ``caches`` are made for."""
        return self.pages, self.state_slots, self.window_pages

    def of(self, tokens: int) -> StepSizes:
        """The sizes of a step of fewer tokens, which has as many rows of logits at most."""
        return replace(self, tokens=tokens, logits=min(tokens, self.logits))


ONE_TOKEN = StepSizes()
"""For what is the same in every program of a model: its nodes and weights."""

MICROBATCHES = ("A", "B")


def microbatch_name(microbatch: str, name: str) -> str:
    """What a microbatch calls its own of a node or a buffer; "" is no microbatch."""
    return f"{microbatch}.{name}" if microbatch else name


def microbatch_dim(microbatch: str) -> str:
    """The dimension of a microbatch's tokens."""
    return f"T{microbatch}"


def microbatch_tokens(T: int) -> tuple[int, int]:
    """The tokens of each microbatch of a step of T."""
    return T - T // 2, T // 2
