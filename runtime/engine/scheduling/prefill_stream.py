"""Prompts in steps of their own, which run beside those of the requests that decode (OSDI 3.3.2).

A prompt whose experts cross a link to the GPU leaves the workers of the CPU free, so others decode
meanwhile. Its step is known to the scheduler from when it is scheduled until its tokens are
delivered:

- Its requests are in no other step, and are not preempted.
- What it computes is shared with other requests when it has ended, no earlier.
- Where one of its requests is cancelled, its pages are given back when the step has ended: it still
  writes to them.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...kv_cache import BlockManager, PageTable
from ...runner.batch import PrefillRunner
from ..requests.request import Request
from .batch_writer import BatchWriter
from .routing_policy import RoutingPolicy
from .step import PrefillChunk, ScheduledStep


class PrefillStream:
    """Steps of prompts in parallel with other steps, one at a time, with a batch of their own.

    Args:
        policy: says which way each step takes.

    Attributes:
        requests: the requests of the step that is scheduled, or runs.
    """

    def __init__(self, runner: PrefillRunner, manager: BlockManager, policy: RoutingPolicy) -> None:
        self._runner, self._policy = runner, policy
        self.writer = BatchWriter(runner, manager)
        self.requests: frozenset[Request] = frozenset()
        self._held: list[PageTable] = []

    def least(self, decoding: bool) -> int:
        """A step of fewer tokens is for the other runner."""
        turning_point = self._runner.min_tokens if decoding else self._runner.min_alone
        return self._policy.least(turning_point, self.max_others > 0)

    @property
    def max_others(self) -> int:
        """Tokens of a step with chunks that is not of the prefill stream, at most."""
        return self._runner.max_others

    def route(self, tokens: int, decoding: bool, idle: float) -> str:
        """The way of a step of so many tokens.

        Args:
            decoding: whether requests decode; ``idle``: see ``RoutingPolicy.choice``.
        """
        least = self.least(decoding)
        return self._policy.choice(self._runner.routes, tokens, least, idle).route

    def schedule(self, chunks: Sequence[PrefillChunk], route: str) -> ScheduledStep:
        """The step of these chunks; those that end their prompt come first."""
        batch = self.writer.write([], chunks)
        self.requests = frozenset(chunk.request for chunk in chunks)
        return ScheduledStep(
            batch,
            [],
            list(chunks),
            [chunk.request for chunk in chunks if chunk.completes],
            [chunk.request for chunk in chunks for _ in chunk.logprob_positions],
            any(sampling.params.logprobs is not None for sampling in batch.sampling),
            route=route,
        )

    def hold(self, request: Request) -> None:
        """Keeps the pages of one that ends while its step runs."""
        self._held.append(request.table)

    def leave(self) -> list[PageTable]:
        """The step has ended; returns the pages that were kept."""
        held, self._held, self.requests = self._held, [], frozenset()
        return held
