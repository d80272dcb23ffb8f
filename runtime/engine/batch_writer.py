"""Fills the one StepBatch: anew when its sequences change, else a few additions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..kv_cache import BlockManager
from .batch import Ints, Runner, SequenceSampling, StepBatch, forced
from .request import Request

PrefillChunk = tuple[Request, int]
"""A request that is not decoding yet, and how many of its tokens the step computes."""


class BatchWriter:
    """Writes the batch of each step into the same arrays."""

    def __init__(self, runner: Runner, manager: BlockManager) -> None:
        self.manager = manager
        self.page_size = runner.page_size
        T, S, R = runner.max_tokens, runner.max_sequences, runner.max_rows
        # What grows by one in every decode step lies together: one addition for all of it.
        self._counters: Ints = np.zeros((4, max(T, S, R)), np.int64)
        positions, slots, lengths, draws = self._counters
        self.batch = StepBatch(
            tokens=np.zeros(T, np.int64),
            positions=positions[:T],
            slots=slots[:T],
            starts=np.zeros(S + 1, np.int64),
            lengths=lengths[:S],
            rows=np.zeros(S, np.int64),
            page_tables=manager.tables,
            sampled=np.zeros(R, np.int64),
            seeds=np.zeros(R, np.int64),
            draws=draws[:R],
        )
        self._live = self._counters[:, :0]

    def write(self, decoding: Sequence[Request], chunks: Sequence[PrefillChunk]) -> StepBatch:
        """The batch of ``decoding``, one token each, and of ``chunks`` behind them.

        Args:
            decoding: at most max_sequences, each with a page for its token.
            chunks: those that end their prompt come first.
        """
        batch, page_size = self.batch, self.page_size
        S = len(decoding)
        batch.tokens[:S] = [request.tokens[-1] for request in decoding]
        batch.starts[: S + 1] = np.arange(S + 1)
        positions = [request.computed for request in decoding]
        batch.positions[:S] = positions
        batch.lengths[:S] = batch.positions[:S] + 1
        T, R = S, S
        requests = list(decoding)
        sampled: list[int] = []  # rows behind those of whole sequences
        scored: list[SequenceSampling] = []
        for request, size in chunks:
            first, last = request.computed, request.computed + size
            at = np.arange(first, last)
            pages = self.manager.tables[request.table.row]
            batch.tokens[T : T + size] = request.tokens[first:last]
            batch.positions[T : T + size] = at
            batch.slots[T : T + size] = pages[at // page_size] * page_size + at % page_size
            batch.lengths[len(requests)] = last
            for position in request.scored(size):
                sampled.append(T + position - first)
                scored.append(forced(request.tokens[position + 1], request.params.logprobs))
            T += size
            R += last == len(request.tokens)
            requests.append(request)
            batch.starts[len(requests)] = T
        batch.S, batch.T, batch.R = len(requests), T, R + len(scored)
        batch.rows[: batch.S] = [request.table.row for request in requests]
        batch.sampled[:R] = batch.starts[1 : R + 1] - 1
        batch.sampled[R : batch.R] = sampled
        batch.sampling = [request.sampling for request in requests[:R]] + scored
        batch.seeds[: batch.R] = [sampling.seed for sampling in batch.sampling]
        batch.draws[:R] = [request.drawn for request in requests[:R]]
        batch.draws[R : batch.R] = 0
        # Padding: a step that runs a whole bucket writes no page for it and attends to nothing.
        batch.slots[T:] = -1
        batch.lengths[batch.S :] = 0
        batch.starts[batch.S + 1 :] = T
        batch.sampled[batch.R :] = 0
        self._live = self._counters[:, :S]
        self._write_slots(decoding)
        batch.version += 1
        batch.tables_version = self.manager.version
        return batch

    def advance(self, decoding: Sequence[Request], new_pages: bool) -> StepBatch:
        """The same sequences one token later; ``take`` was given the tokens.

        Args:
            decoding: as ``write`` was given, without chunks.
            new_pages: whether any of them begins a page.
        """
        self._live += 1
        if new_pages:
            self._write_slots(decoding)
        self.batch.tables_version = self.manager.version
        return self.batch

    def take(self, tokens: Ints) -> None:
        """Tokens that decoding sequences have drawn: the next step's, if they stay."""
        S = self._live.shape[1]
        self.batch.tokens[:S] = tokens[:S]

    def _write_slots(self, decoding: Sequence[Request]) -> None:
        page_size = self.page_size
        self.batch.slots[: len(decoding)] = [
            r.table.pages[r.computed // page_size] * page_size + r.computed % page_size
            for r in decoding
        ]
