"""What one step computes, as the engine remembers it while the next one is scheduled."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from ...kv_cache.prefix import PrefixNode
from ...runner.batch import StepBatch
from ..requests.request import Request


class PrefillChunk(NamedTuple):
    """Tokens ``first`` to ``first + size`` of a request that does not decode yet."""

    request: Request
    first: int
    size: int

    @property
    def last(self) -> int:
        """The token behind it."""
        return self.first + self.size

    @property
    def completes(self) -> bool:
        """Whether it ends the prompt, so that a token is drawn behind it."""
        return self.last == len(self.request.tokens)

    @property
    def logprob_positions(self) -> range:
        """Positions whose logits give the log-probability of a token of the prompt."""
        return self.request.prompt_logprob_positions(self.first, self.size)


@dataclass(slots=True, eq=False)
class ScheduledStep:
    """One step, from its scheduling until its tokens are delivered; or several, if each computes
    the same requests' next tokens.

    Attributes:
        batch: its arrays, until the next step is scheduled.
        T, R: its tokens, and rows of logits.
        decoding: the requests with one token each.
        chunks: those that end their prompt come first.
        sampled: the requests that it samples a token for, in the order of the rows.
        logprob_requests: for each further row, the request whose prompt logprob it gives.
        ends: tokens that end one of them, if it has enough tokens.
        counted: those with penalties, each behind its row.
        masked: those with a constraint, likewise.
        scored: whether any row gives logprobs.
        inserted: the pages that it fills and others may share already; ``snapshots``: likewise,
            those at whose ends it leaves states.
    """

    batch: StepBatch
    decoding: list[Request]
    chunks: list[PrefillChunk]
    sampled: list[Request]
    logprob_requests: list[Request]
    scored: bool
    ends: frozenset[int] = field(init=False)
    counted: list[tuple[int, Request]] = field(init=False)
    masked: list[tuple[int, Request]] = field(init=False)
    T: int = field(init=False)
    R: int = field(init=False)
    inserted: list[PrefixNode] = field(default_factory=list)
    snapshots: list[PrefixNode] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.T, self.R = self.batch.T, self.batch.R
        self.ends = frozenset().union(*(request.end_ids for request in self.sampled))
        self.counted = [
            (row, request)
            for row, request in enumerate(self.sampled)
            if request.sampling.counts is not None
        ]
        self.masked = [
            (row, request) for row, request in enumerate(self.sampled) if request.masked is not None
        ]

    @property
    def requests(self) -> list[Request]:
        """All requests of the step."""
        return self.decoding + [chunk.request for chunk in self.chunks]
