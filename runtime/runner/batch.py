"""The interface between the engine and a device: StepBatch, StepResult, Runner."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pykernels.errors import PykernelsError

from .constraint import Mask
from .counts import TokenCounts
from .routing import LayerRouting, RoutedLayer
from .sampling_params import SamplingParams

Ints = NDArray[np.int64]


class DeviceLost(PykernelsError):
    """No later step of this runner can work: a lost GPU, dead workers. It ends the engine; any
    other error of a step ends only the requests of that step."""


BANNED_BIAS = -1e30
"""Bias of a token that must not be sampled: minus infinity to a softmax, and still finite."""


class SequenceSampling:
    """What a runner needs to sample one sequence's tokens, besides seed and number of draws.

    All but the contents of ``counts`` and ``mask`` is fixed: ``StepBatch.version`` grows when a
    sequence gets another.

    Attributes:
        params: temperature, top-k and so on. Its ``logit_bias`` and ``stop_token_ids`` are not
            for the runner: ``bias_ids`` holds what applies.
        seed: of the draws, 0 to 2**63 - 1.
        counts: seen tokens; None if ``params`` has no penalties.
        bias_ids: int32 [N], distinct.
        bias_values: float32 [N], added to the logits; finite, ``BANNED_BIAS`` for what must not be
            drawn.
        mask: int32 [ceil(vocab_size / 32)], read before each step: bit v % 32 of word v // 32 is
            set where token v may be drawn; None: all may.
    """

    __slots__ = ("bias_ids", "bias_values", "counts", "mask", "params", "seed")

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        counts: TokenCounts | None,
        bias: Mapping[int, float],
        mask: Mask | None = None,
    ) -> None:
        self.params, self.seed, self.counts, self.mask = params, seed, counts, mask
        self.bias_ids = np.fromiter(bias.keys(), np.int32, len(bias))
        self.bias_values = np.clip(list(bias.values()), BANNED_BIAS, -BANNED_BIAS).astype(
            np.float32
        )


@cache
def _greedy(logprobs: int | None) -> SamplingParams:
    return SamplingParams(temperature=0, logprobs=logprobs)


def forced(token: int, logprobs: int | None) -> SequenceSampling:
    """Draws ``token`` whatever the logits are: for its log-probability, which no bias changes."""
    return SequenceSampling(_greedy(logprobs), 0, None, {token: -BANNED_BIAS})


@dataclass(slots=True, eq=False)
class StepBatch:
    """One forward step: T tokens of S sequences, and R rows of logits, each of which samples a
    token.

    The engine makes one and changes it from step to step, also while a step runs: a runner reads it
    in ``launch`` only, and has a copy of its own for its device. Arrays are int64.

    Sequences that decode come first: a sequence's tokens are its last sampled one and drafts of
    those that follow it, each of which has a row of logits; those without drafts lead. Then come
    chunks that end their prompt, then other chunks. Behind the rows of those that decode are the
    last tokens of the chunks that end a prompt; rows for prompt logprobs follow.

    Padding, so that a device may run a whole bucket: behind T ``slot_mapping`` are -1 (nothing is
    written), behind S ``seq_lens`` are 0, ``state_slots`` -1 and ``query_start_loc`` T, behind R
    ``logits_indices`` are 0. Other entries there are old, but always valid ids.

    Attributes:
        S: sequences of this step; ``D``: those of them that decode.
        T: tokens of this step.
        R: rows of logits.
        version: grows when S, ``page_table_rows``, ``sampling`` or the tokens a sequence change.
            While it is unchanged, every sequence has one token; ``positions``, ``seq_lens`` and
            ``draws`` grow by 1 each step, and besides them only ``tokens``, ``slot_mapping`` and
            the page tables change.
        tables_version: grows when ``page_tables`` or ``window_tables`` changes.
        every: [5, max of all] what changes in every step, in one block: ``tokens``, ``positions``,
            ``slot_mapping``, ``seq_lens`` and ``draws`` are its rows, and ``window_slots``, if it
            is there.
        tokens: [max_num_batched_tokens] ids.
        positions: [max_num_batched_tokens] place of each token in its sequence, from 0.
        is_prompt: [max_num_batched_tokens] 1 for a token of a prompt, 0 for one of an output, which
            is among a chunk's where it is computed again.
        slot_mapping: [max_num_batched_tokens] where its keys and values go: ``page * page_size +
            offset``.
        query_start_loc: [max_num_seqs + 1]; tokens of sequence s: ``query_start_loc[s]`` to
            ``query_start_loc[s + 1]``.
        seq_lens: [max_num_seqs] positions that sequence s attends to, this step's included.
        page_table_rows: [max_num_seqs] the row of ``page_tables`` that belongs to sequence s.
        state_slots: [max_num_seqs] where the state of sequence s is, if layers have states; one of
            whose keys are all of this step starts from nothing, whatever is there.
        tails, saved_slots: [max_num_seqs] tokens of sequence s behind a state that the step saves
            on its way, a page of them at most, and the slot that gets it; 0 and -1: none. Only
            where the runner ``saves_states``.
        page_tables: [max_num_seqs, max_pages]; position p of sequence s lies in page
            ``page_tables[page_table_rows[s], p // page_size]``.
        table_pages: columns of ``page_tables`` that the step reads.
        window_tables, window_slots: ``page_tables`` and ``slot_mapping`` of layers with a window
            that have pages of their own; None: none has. Only pages in the window of some token of
            the step are a sequence's own.
        logits_indices: [max_num_logits] index of the token that row r of the logits belongs to.
        seeds: [max_num_logits] of the draws.
        draws: [max_num_logits] tokens that the sequence of row r has drawn before; the drafts in
            front of the row's own token count as drawn.
        sampling: R entries, one per row; a new list whenever they change. A runner keeps it until
            the step has ended: kernels read what it holds.
    """

    every: Ints
    tokens: Ints
    positions: Ints
    is_prompt: Ints
    slot_mapping: Ints
    query_start_loc: Ints
    seq_lens: Ints
    page_table_rows: Ints
    state_slots: Ints
    tails: Ints
    saved_slots: Ints
    page_tables: Ints
    logits_indices: Ints
    seeds: Ints
    draws: Ints
    window_tables: Ints | None = None
    window_slots: Ints | None = None
    sampling: list[SequenceSampling] = field(default_factory=list)
    S: int = 0
    D: int = 0
    T: int = 0
    R: int = 0
    table_pages: int = 0
    version: int = 0
    tables_version: int = 0

    @property
    def num_scheduled(self) -> Ints:
        """[S] tokens of each sequence in this step."""
        return np.diff(self.query_start_loc[: self.S + 1])

    @classmethod
    def allocate(
        cls, T: int, S: int, R: int, page_tables: Ints, window_tables: Ints | None = None
    ) -> StepBatch:
        """An empty one, for at most T tokens of S sequences and R rows of logits."""
        windows = window_tables is not None
        every = np.zeros((5 + windows, max(T, S, R)), np.int64)
        tokens, positions, slot_mapping, seq_lens, draws = every[:5]
        for slots in (slot_mapping, *every[5:]):
            slots.fill(-1)
        return cls(
            every=every,
            tokens=tokens[:T],
            positions=positions[:T],
            is_prompt=np.zeros(T, np.int64),
            slot_mapping=slot_mapping[:T],
            query_start_loc=np.zeros(S + 1, np.int64),
            seq_lens=seq_lens[:S],
            page_table_rows=np.zeros(S, np.int64),
            state_slots=np.full(S, -1, np.int64),
            tails=np.zeros(S, np.int64),
            saved_slots=np.full(S, -1, np.int64),
            page_tables=page_tables,
            logits_indices=np.zeros(R, np.int64),
            seeds=np.zeros(R, np.int64),
            draws=draws[:R],
            window_tables=window_tables,
            window_slots=every[5, :T] if windows else None,
        )

    def like(self) -> StepBatch:
        """An empty one of the same sizes, for ``copy_to``."""
        T, S, R = len(self.tokens), len(self.seq_lens), len(self.seeds)
        windows = None if self.window_tables is None else np.zeros_like(self.window_tables)
        return StepBatch.allocate(T, S, R, np.zeros_like(self.page_tables), windows)

    def copy_to(self, other: StepBatch) -> None:
        """Brings ``other``, a copy from some steps ago, up to date.

        It costs a few microseconds while the version stays.
        """
        if other.version == self.version:
            other.every[:, : self.S] = self.every[:, : self.S]
        else:
            # What lies behind both is padding already.
            most = max(self.T, self.S, self.R, other.T, other.S, other.R)
            other.every[:, :most] = self.every[:, :most]
            other.is_prompt[: self.T] = self.is_prompt[: self.T]
            other.query_start_loc[:] = self.query_start_loc
            other.page_table_rows[: self.S] = self.page_table_rows[: self.S]
            other.state_slots[:] = self.state_slots
            other.tails[:], other.saved_slots[:] = self.tails, self.saved_slots
            R = max(self.R, other.R)
            other.logits_indices[:R] = self.logits_indices[:R]
            other.seeds[:R] = self.seeds[:R]
            other.sampling = self.sampling
            other.S, other.D, other.T, other.R = self.S, self.D, self.T, self.R
            other.version = self.version
        columns = self.table_pages
        # Of the same tables, a step of longer sequences reads more columns than the one before.
        if other.tables_version != self.tables_version or other.table_pages < columns:
            other.page_tables[:, :columns] = self.page_tables[:, :columns]
            if other.window_tables is not None and self.window_tables is not None:
                other.window_tables[:, :columns] = self.window_tables[:, :columns]
            other.table_pages, other.tables_version = columns, self.tables_version


@dataclass(slots=True, eq=False)
class StepResult:
    """Sampled tokens of one step, valid until the next is launched; a runner may return the same
    object every time.

    Attributes:
        sampled_token_ids: int64 [>= R].
        logprobs: float32 [>= R], log-softmax of the logits as the model gave them, at these tokens;
            needed where ``params.logprobs`` is not None.
        top_ids: int64 [>= R, >= N], the N = ``params.logprobs`` most likely tokens of these
            logits, best first; needed where N > 0.
        top_logprobs: float32, the same shape.
        routing: of each of the runner's ``routed_layers``.
    """

    sampled_token_ids: Ints
    logprobs: NDArray[np.float32] | None = None
    top_ids: Ints | None = None
    top_logprobs: NDArray[np.float32] | None = None
    routing: Iterable[LayerRouting] = ()

    def copy(self) -> StepResult:
        """One that stays valid."""
        return StepResult(
            self.sampled_token_ids.copy(),
            None if self.logprobs is None else self.logprobs.copy(),
            None if self.top_ids is None else self.top_ids.copy(),
            None if self.top_logprobs is None else self.top_logprobs.copy(),
        )


class StepRunner(Protocol):
    """Runs steps of a model on a device, over its KV cache. Its methods are called by one thread at
    a time.

    At most one step runs: ``launch`` follows the ``result`` of the step before, unless a step was
    launched behind that one and runs (``Runner.launch_behind``).
    """

    page_size: int
    """Tokens per page."""
    num_pages: int
    """Pages of the cache, 0 to num_pages - 1."""
    state_slots: int
    """Slots of states, one a sequence and others for snapshots; 0: no layer has a state."""
    max_num_batched_tokens: int
    """Most tokens in one step."""
    max_num_seqs: int
    """Most sequences in one step."""
    max_num_logits: int
    """Most rows of logits of a step; at least ``max_num_seqs``."""
    max_model_len: int
    """Positions that the model was made for."""
    vocab_size: int
    routed_layers: Sequence[RoutedLayer]
    """The layers whose choices of experts a step gives back, once it is bound; none: it cannot."""

    @property
    def deferred(self) -> int:
        """Experts of a token of an output that join a layer later, once the runner is bound: then
        its keys and values are others than those of the same token in a prompt."""

    @property
    def least_seconds(self) -> float:
        """A step with streamed prompts takes about so long, however few its tokens are: all
        experts cross. 0: nobody knows, or there is none."""

    @property
    def why_no_drafts(self) -> str:
        """Why no sequence that decodes may have drafts, as a clause; "": each may. Keys and values
        of drafts that are not accepted are written over."""

    def launch(self, batch: StepBatch) -> None:
        """Start a step: write keys and values of all T tokens, draw one token for each of R rows.

        An exception, here or of ``result``, fails the step's requests and the engine goes on;
        ``DeviceLost`` ends it.
        """
        ...

    def result(self) -> StepResult:
        """Wait for the step that was launched, and give what it drew."""
        ...

    def copy_states(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy the states of slots to other slots, (from, to), one after the other. No step runs;
        the next one is launched behind it. An error ends the engine."""
        ...


class PrefillRunner(StepRunner, Protocol):
    """Runs steps of prompts over the cache of another runner, beside its steps. A sequence is in a
    step of one of them only."""

    routes: Sequence[str]
    """Ways in which it can run a step, of ``route.Route``; one at least."""

    min_tokens: int
    """A step of fewer is faster on the other runner."""
    min_alone: int
    """The same while no sequence decodes, so that the other runner may use the whole machine."""
    max_others: int
    """Most tokens of a step with prompts on the main runner: ``min_tokens`` - 1 and those of as
    many sequences as may decode, or more; 0: it takes no prompts."""

    def take(self, route: str) -> None:
        """The way of the step that is launched next, one of ``routes``; called before each launch
        where there are several."""
        ...

    def park(self, seconds: float) -> None:
        """The step that runs, if any, stops at the end of a layer, with all that it holds, and goes
        on after ``resume``, or by itself when so many seconds are over. Returns at once."""
        ...

    def resume(self) -> None:
        """The step goes on, if it is parked; ``result`` and ``launch`` do the same."""
        ...

    def ready(self) -> bool:
        """Whether ``result`` need not wait."""
        ...


class Runner(StepRunner, Protocol):
    """A model on a device, with its KV cache."""

    window_pages: int
    """Pages of layers with a window; 0: they have ``num_pages`` like the others."""
    window: int
    """Keys that a token of these layers sees."""

    @property
    def prefill_runner(self) -> PrefillRunner | None:
        """Runs long prompts beside this one's steps, once this one is bound; None: nothing does."""
        ...

    streams_from: int
    """Tokens from which its own steps with prompts stream experts, once it is bound; 0: none do."""
    saves_states: bool
    """Whether steps with prompts save states on their way (``StepBatch.saved_slots``)."""
    late_masks: bool
    """Whether a step with masks may be launched before they are written."""
    next_runs: bool
    """After ``result``: whether the step that was launched behind that one runs."""

    def bind(self, batch: StepBatch) -> None:
        """Called once, before the first step, with the batch that later steps are written into."""
        ...

    def launch_behind(self, batch: StepBatch, ends: Set[int]) -> bool:
        """Launch the next step while one runs, which draws its tokens: no penalties, no masks, and
        nobody reads log-probabilities. It is given up where that one fails or draws a token of
        ``ends``, and where ``give_up_next`` is called before that one ends.

        Returns:
            False where it cannot be, as with other page tables: then it is launched as ever.
        """
        ...

    def give_up_next(self) -> None:
        """Gives up the step that was launched behind: another one is to come. Any thread may
        call it."""
        ...

    def write_masks(self) -> None:
        """Called once after each ``launch`` of a batch whose masks may be late: they are written,
        and the sampler, which waits for this, may read them."""
        ...
