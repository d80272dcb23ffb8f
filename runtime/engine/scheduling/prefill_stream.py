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
from .step import PrefillChunk, ScheduledStep


class PrefillStream:
    """Steps of prompts in parallel with other steps, one at a time, with a batch of their own.

    Attributes:
        requests: the requests of the step that is scheduled, or runs.
    """

    def __init__(self, runner: PrefillRunner, manager: BlockManager) -> None:
        self._runner = runner
        self.writer = BatchWriter(runner, manager)
        self.requests: frozenset[Request] = frozenset()
        self._held: list[PageTable] = []

    def least(self, decoding: bool) -> int:
        """A step of fewer tokens is for the other runner."""
        return self._runner.min_tokens if decoding else self._runner.min_alone

    @property
    def max_others(self) -> int:
        """Tokens of a step with chunks that is not of the prefill stream, at most."""
        return self._runner.max_others

    def schedule(self, chunks: Sequence[PrefillChunk]) -> ScheduledStep:
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
        )

    def hold(self, request: Request) -> None:
        """Keeps the pages of one that ends while its step runs."""
        self._held.append(request.table)

    def leave(self) -> list[PageTable]:
        """The step has ended; returns the pages that were kept."""
        held, self._held, self.requests = self._held, [], frozenset()
        return held
