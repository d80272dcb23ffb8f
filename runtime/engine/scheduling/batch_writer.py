"""Writes the StepBatch: completely when its sequences change, else with a few additions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ...kv_cache import BlockManager
from ...runner.batch import Ints, SequenceSampling, StepBatch, StepRunner, forced
from ..requests.request import Request
from .step import PrefillChunk


class BatchWriter:
    """Writes the batch of each step into the same arrays."""

    def __init__(self, runner: StepRunner, manager: BlockManager) -> None:
        self.manager = manager
        self.page_size = runner.page_size
        T, S, R = runner.max_num_batched_tokens, runner.max_num_seqs, runner.max_num_logits
        windows = None if manager.windows is None else manager.windows.tables
        self.batch = StepBatch.allocate(T, S, R, manager.tables, windows)
        # All that changes in a decode step but the tokens grows by one.
        self._counters = self.batch.every[1:]
        self._live = self._counters[:, :0]
        self._rows: Ints | slice = slice(0)

    def write(
        self,
        decoding: Sequence[Request],
        chunks: Sequence[PrefillChunk],
        rows: Mapping[Request, int] | None = None,
        drafts: Sequence[Sequence[int]] = (),
    ) -> StepBatch:
        """The batch of ``decoding``, one token each and its drafts, and of ``chunks`` behind them.

        Args:
            decoding: at most max_num_seqs, each with pages for its tokens.
            chunks: those that end their prompt come first.
            rows: of the step that still draws the tokens of ``decoding``: ``set_tokens`` brings
                them. None: they are known.
            drafts: of each of ``decoding``, where tokens are known; none: none has drafts.
        """
        batch = self.batch
        T, sampling = self._write_decoding(decoding, rows, drafts)
        requests = list(decoding)
        batch.tails[:], batch.saved_slots[:] = 0, -1
        logprob_rows: list[int] = []  # indices of the tokens that give prompt logprobs
        forced_sampling: list[SequenceSampling] = []
        for chunk in chunks:
            request, first, size = chunk
            last = chunk.last
            at = np.arange(first, last)
            batch.tokens[T : T + size] = request.tokens[first:last]
            batch.positions[T : T + size] = at
            batch.is_prompt[T : T + size] = at < request.prompt_size
            self._write_slots(slice(T, T + size), request.table.row, at)
            s = len(requests)
            batch.seq_lens[s] = last
            batch.tails[s], batch.saved_slots[s] = self.manager.save_in_step(
                request.table, first, last
            )
            for position in chunk.logprob_positions:
                logprob_rows.append(T + position - first)
                forced_sampling.append(
                    forced(request.tokens[position + 1], request.params.logprobs)
                )
            if chunk.completes:
                batch.logits_indices[len(sampling)] = T + size - 1
                batch.draws[len(sampling)] = request.drawn
                sampling.append(request.next_sampling)
            T += size
            requests.append(request)
            batch.query_start_loc[len(requests)] = T
        R = len(sampling)
        batch.sampling = sampling + forced_sampling
        batch.S, batch.T, batch.R = len(requests), T, len(batch.sampling)
        batch.page_table_rows[: batch.S] = [request.table.row for request in requests]
        batch.state_slots[: batch.S] = [request.table.slot for request in requests]
        batch.logits_indices[R : batch.R] = logprob_rows
        batch.draws[R : batch.R] = 0
        batch.seeds[: batch.R] = [sampling.seed for sampling in batch.sampling]
        # Padding: a step that runs a whole bucket writes no page for it and attends to nothing.
        batch.slot_mapping[T:] = -1
        if batch.window_slots is not None:
            batch.window_slots[T:] = -1
        batch.seq_lens[batch.S :] = 0
        batch.state_slots[batch.S :] = -1
        batch.query_start_loc[batch.S + 1 :] = T
        batch.logits_indices[batch.R :] = 0
        batch.version += 1
        self._set_tables(requests)
        return batch

    def _write_decoding(
        self,
        decoding: Sequence[Request],
        rows: Mapping[Request, int] | None,
        drafts: Sequence[Sequence[int]],
    ) -> tuple[int, list[SequenceSampling]]:
        """Writes the tokens of those that decode, and a row of logits for each of them.

        Returns:
            How many tokens they have, and how each is sampled.
        """
        batch, D = self.batch, len(decoding)
        counts = np.array([1 + len(draft) for draft in drafts] or [1] * D, np.int64)
        batch.query_start_loc[1 : D + 1] = np.cumsum(counts)
        T = int(batch.query_start_loc[D])
        of = np.repeat(np.arange(D), counts)  # [T] the sequence of each token
        ahead = np.arange(T) - batch.query_start_loc[of]  # [T] its place among those of the step
        batch.D, self._live = D, self._counters[:, :D]
        batch.page_table_rows[:D] = [request.table.row for request in decoding]
        computed = np.array([request.computed for request in decoding], np.int64)
        batch.seq_lens[:D] = computed + counts
        batch.positions[:T] = computed[of] + ahead
        batch.draws[:T] = np.array([request.drawn for request in decoding], np.int64)[of] + ahead
        batch.is_prompt[:T], batch.logits_indices[:T] = 0, np.arange(T)
        self._rows = slice(D)
        if rows is not None:
            self._rows = np.array([rows[request] for request in decoding], np.int64)
        elif drafts:
            tokens = [
                [request.tokens[-1], *draft]
                for request, draft in zip(decoding, drafts, strict=True)
            ]
            batch.tokens[:T] = [token for each in tokens for token in each]
        else:
            batch.tokens[:T] = [request.tokens[-1] for request in decoding]
        self._write_slot_mapping(batch.page_table_rows[of])
        sampling = [request.next_sampling for request in decoding]
        return T, [sampling[s] for s in of.tolist()]

    def advance(self, decoding: Sequence[Request], new_pages: bool) -> None:
        """Advances every sequence by one token; ``set_tokens`` may come before or after.

        Args:
            decoding: as ``write`` was given, without chunks.
            new_pages: whether any of them begins a page.
        """
        self._live += 1
        self._rows = slice(self._live.shape[1])
        if new_pages:
            self._write_slot_mapping(self.batch.page_table_rows[: len(decoding)])
            self._set_tables(decoding)
        self.batch.tables_version = self.manager.version

    def set_tokens(self, tokens: Ints) -> None:
        """Writes what a step drew as the inputs of the next one, which is written or advances."""
        S = self._live.shape[1]
        self.batch.tokens[:S] = tokens[self._rows]
        self._rows = slice(S)

    def _set_tables(self, requests: Sequence[Request]) -> None:
        batch = self.batch
        batch.tables_version = self.manager.version
        batch.table_pages = max(len(request.table.pages) for request in requests)

    def _write_slot_mapping(self, rows: Ints) -> None:
        """Where the first tokens of the step go; ``rows``: of the page tables of their
        sequences."""
        tokens = slice(len(rows))
        self._write_slots(tokens, rows, self.batch.positions[tokens])

    def _write_slots(self, tokens: slice, rows: Ints | int, positions: Ints) -> None:
        batch, (pages, places) = self.batch, np.divmod(positions, self.page_size)
        batch.slot_mapping[tokens] = batch.page_tables[rows, pages] * self.page_size + places
        if batch.window_tables is not None and batch.window_slots is not None:
            batch.window_slots[tokens] = batch.window_tables[rows, pages] * self.page_size + places
