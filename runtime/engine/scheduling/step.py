"""What one step computes, as the engine remembers it while the next one is scheduled."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, takewhile
from typing import NamedTuple

from ...kv_cache.prefix import PrefixNode
from ...runner.batch import StepBatch
from ...runner.route import Route
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
        decoding: the requests that decode: their last token, and drafts behind it.
        drafts: of each of these; none: none has drafts.
        route: the way of its chunks.
        num_scheduled: tokens of each of these; ``num_accepted``: those of its drafts that are what
            was drawn, once the step has ended.
        chunks: those that end their prompt come first.
        sampled: the requests that it samples tokens for: those that decode, then chunks.
        rows: the first row of each of these, in order.
        logprob_requests: for each row behind ``drawn``, the request whose prompt logprob it gives.
        ends: tokens that end one of them, if it has enough tokens.
        counted: those with penalties, each behind its row.
        masked: those with a constraint, likewise.
        scored: whether any row gives logprobs.
        inserted: the pages that it fills and others may share already; ``snapshots``: likewise,
            those at whose ends it leaves states; ``completed``: those that were there, and get
            from it what layers with a window lacked.
    """

    batch: StepBatch
    decoding: list[Request]
    chunks: list[PrefillChunk]
    sampled: list[Request]
    logprob_requests: list[Request]
    scored: bool
    drafts: list[list[int]] = field(default_factory=list)
    route: str = Route.CHUNKED
    num_scheduled: list[int] = field(init=False)
    num_accepted: list[int] = field(init=False)
    rows: Sequence[int] = field(init=False)
    drawn: int = field(init=False)
    ends: frozenset[int] = field(init=False)
    counted: list[tuple[int, Request]] = field(init=False)
    masked: list[tuple[int, Request]] = field(init=False)
    T: int = field(init=False)
    R: int = field(init=False)
    inserted: list[PrefixNode] = field(default_factory=list)
    snapshots: list[PrefixNode] = field(default_factory=list)
    completed: list[PrefixNode] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.T, self.R = self.batch.T, self.batch.R
        self.num_accepted = [0] * len(self.decoding)
        self.num_scheduled = [1 + len(draft) for draft in self.drafts] or [1] * len(self.decoding)
        each = [*self.num_scheduled, *[1] * (len(self.sampled) - len(self.decoding))]
        *self.rows, self.drawn = accumulate(each, initial=0)
        self.ends = frozenset().union(*(request.end_ids for request in self.sampled))
        rows = list(zip(self.rows, self.sampled, strict=True))
        self.counted = [(row, r) for row, r in rows if r.sampling.counts is not None]
        self.masked = [(row, r) for row, r in rows if r.masked is not None]

    def accept(self, sampled_token_ids: Sequence[int]) -> None:
        """Sets ``num_accepted``: each draft was drawn behind the right tokens if those in front
        of it are what was drawn."""
        for i, draft in enumerate(self.drafts):
            row = self.rows[i]
            right = map(operator.eq, draft, sampled_token_ids[row : row + len(draft)])
            self.num_accepted[i] = sum(takewhile(bool, right))

    @property
    def requests(self) -> list[Request]:
        """All requests of the step."""
        return self.decoding + [chunk.request for chunk in self.chunks]
