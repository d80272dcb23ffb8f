"""A runner whose cache holds the tokens themselves: any mix-up of pages changes what it draws."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence, Set
from dataclasses import dataclass, field

import numpy as np

from runtime.engine import SequenceSampling, StepBatch, StepResult
from runtime.kv_cache import BlockManager, PageTable
from runtime.runner.batch import BANNED_BIAS


def draw(history: Sequence[int] | np.ndarray, seed: int, draws: int, vocab: int) -> int:
    """The next token: a pure function of what it may depend on."""
    data = np.asarray(history, np.int64).tobytes() + seed.to_bytes(8, "little")
    return zlib.crc32(data + draws.to_bytes(8, "little")) % vocab


def expected(prompt: Sequence[int], seed: int, count: int, vocab: int = 997) -> tuple[int, ...]:
    """What a request must draw, whatever runs beside it."""
    tokens = list(prompt)
    for draws in range(count):
        tokens.append(draw(tokens, seed, draws, vocab))
    return tuple(tokens[len(prompt) :])


def chained(chain: int, tokens: Sequence[int]) -> int:
    """A state of tokens behind others: it depends on all of them and on their order."""
    for token in tokens:
        chain = zlib.crc32(int(token).to_bytes(8, "little"), chain)
    return chain


def score(history: Sequence[int] | np.ndarray, token: int) -> float:
    """The log-probability of a token behind others: a pure function, too."""
    return -float(draw(history, token, 0, 997))


@dataclass
class FakeRunner:
    page_size: int = 4
    num_pages: int = 64
    max_num_batched_tokens: int = 16
    max_num_seqs: int = 8
    max_num_logits: int = 10
    max_model_len: int = 200
    vocab_size: int = 997
    state_slots: int = 0
    saves_states: bool = False
    saved: int = 0
    """States that steps have saved on their way."""
    window_pages: int = 0
    window: int = 0
    deferred = 0
    routed_layers = ()
    prefill_runner = None
    streams_from = 0
    least_seconds = 0.0
    why_no_drafts = ""
    late_masks = True
    cache: np.ndarray = field(init=False)
    states: list[tuple[int, int]] = field(init=False)
    """By slot, the number of tokens that its state is of, and a chain of hashes of them."""
    most_seqs: int = 0
    """S of the largest step."""
    drawn: dict[int, list[int]] = field(default_factory=dict)
    """By seed, which is another for each request of a test."""
    sizes: list[int] = field(default_factory=list)
    """T of each step."""
    seen: tuple[int, object, int, object] | None = None
    fail_next: Exception | None = None
    running: bool = False
    next_runs: bool = False
    behind: tuple[np.ndarray, Set[int]] | None = None
    given_up: bool = False

    def __post_init__(self) -> None:
        self.cache = np.full(self.num_pages * self.page_size, -1)
        self.states = [(-1, 0)] * self.state_slots
        self.windowed = np.full(self.window_pages * self.page_size, -1)

    def close(self) -> None:
        """It holds nothing that a device has."""

    def bind(self, batch: StepBatch) -> None:
        self.bound, self.own = batch, batch.like()

    def launch(self, batch: StepBatch) -> None:
        """Copies the batch: the engine writes the next step into it while this one runs."""
        assert batch is self.bound and not self.running
        batch.copy_to(self.own)
        self.running = True

    def write_masks(self) -> None:
        """They are read when the step's end is awaited, where they lie."""
        assert self.running

    def launch_behind(self, batch: StepBatch, ends: Set[int]) -> bool:
        """What the next step reads besides the tokens that this one draws."""
        assert batch is self.bound and self.running
        own = self.own
        if (batch.version, batch.tables_version) != (own.version, own.tables_version):
            return False
        self.behind, self.given_up = (batch.every.copy(), ends), False
        return True

    def give_up_next(self) -> None:
        self.given_up = True

    def result(self) -> StepResult:
        assert self.running
        behind, self.behind, self.running, self.next_runs = self.behind, None, False, False
        found = self.step(self.own)
        if behind is not None:
            (every, ends), S = behind, self.own.S
            drawn = found.sampled_token_ids[:S]
            if not self.given_up and ends.isdisjoint(drawn.tolist()):
                every[0, :S] = drawn
                self.own.every[:, :S] = every[:, :S]
                self.running = self.next_runs = True
        return found

    def copy_states(self, copies: Sequence[tuple[int, int]]) -> None:
        assert not self.running
        for source, target in copies:
            assert source != target
            self.states[target] = self.states[source]

    def step(self, batch: StepBatch) -> StepResult:
        """The step itself, when its end is awaited."""
        self.sizes.append(batch.T)
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        assert batch.T <= self.max_num_batched_tokens and batch.S <= self.max_num_seqs
        self.most_seqs = max(self.most_seqs, batch.S)
        self._check_versions(batch)
        assert batch.R <= self.max_num_logits and batch.query_start_loc[batch.S] == batch.T
        slots = batch.slot_mapping[: batch.T]
        assert len(set(slots.tolist())) == batch.T, "two tokens write the same slot"
        self.cache[slots] = batch.tokens[: batch.T]
        if self.window_pages:
            slots = batch.window_slots[: batch.T]
            assert len(set(slots.tolist())) == batch.T, "two tokens write the same slot"
            self.windowed[slots] = batch.tokens[: batch.T]
        tokens = np.zeros(self.max_num_logits, np.int64)
        logprobs = np.zeros(self.max_num_logits, np.float32)
        histories = [self._history(batch, s) for s in range(batch.S)]
        if self.state_slots:
            self._step_states(batch, histories)
        assert len(batch.sampling) == batch.R
        self._check_padding(batch)
        for row, how in enumerate(batch.sampling):
            at = int(batch.logits_indices[row])
            s = int(np.searchsorted(batch.query_start_loc[: batch.S + 1], at, side="right")) - 1
            history = histories[s][: batch.positions[at] + 1]
            given = how.bias_ids[how.bias_values == np.float32(-BANNED_BIAS)].tolist()
            if given:
                assert (batch.seeds[row], batch.draws[row]) == (0, 0)
            else:
                assert at == self._drawn_behind(batch, row), "what is drawn comes first"
            tokens[row] = given[0] if given else self._draw(history, batch, row, how)
            logprobs[row] = score(history, int(tokens[row]))
        top = np.tile(np.arange(20), (self.max_num_logits, 1))
        return StepResult(tokens, logprobs, top, -top.astype(np.float32))

    def _drawn_behind(self, batch: StepBatch, row: int) -> int:
        """The token that a row is of: every one of those that decode, then the chunks' last."""
        decoded = int(batch.query_start_loc[batch.D])
        return row if row < decoded else batch.query_start_loc[batch.D + row - decoded + 1] - 1

    def _check_padding(self, batch: StepBatch) -> None:
        """A device may run the whole bucket: what lies behind the step touches no page."""
        assert (batch.slot_mapping[batch.T :] == -1).all()
        assert (batch.seq_lens[batch.S :] == 0).all()
        assert (batch.state_slots[batch.S :] == -1).all()
        assert (batch.query_start_loc[batch.S :] == batch.T).all()
        assert (batch.logits_indices[batch.R :] == 0).all()
        assert (0 <= batch.page_tables).all() and (batch.page_tables < self.num_pages).all()
        if self.window_pages:
            assert (batch.window_slots[batch.T :] == -1).all()
            assert (0 <= batch.window_tables).all()
            assert (batch.window_tables < self.window_pages).all()

    def _step_states(self, batch: StepBatch, histories: Sequence[np.ndarray]) -> None:
        """Each sequence's state is of just the tokens in front of this step's, and goes on."""
        slots = batch.state_slots[: batch.S].tolist()
        assert len(set(slots)) == len(slots), "two sequences have one slot"
        assert all(0 <= slot < self.state_slots for slot in slots)
        saved = [slot for slot in batch.saved_slots[: batch.S].tolist() if slot >= 0]
        assert len({*slots, *saved}) == len(slots) + len(saved), "a slot of a sequence is written"
        assert (batch.saved_slots[batch.S :] == -1).all() and not batch.tails[batch.S :].any()
        for s, slot in enumerate(slots):
            first, last = batch.query_start_loc[s : s + 2].tolist()
            length, tokens = int(batch.seq_lens[s]), histories[s].tolist()
            done = length - (last - first)
            count, chain = self.states[slot] if done else (0, 0)
            assert (count, chain) == (done, chained(0, tokens[:done])), "a stale state"
            self.states[slot] = length, chained(chain, tokens[done:])
            tail, target = int(batch.tails[s]), int(batch.saved_slots[s])
            assert (tail > 0) == (target >= 0) and tail <= min(self.page_size, last - first - 1)
            if tail:
                assert self.saves_states and (length - tail) % self.page_size == 0
                head = tokens[: length - tail]
                self.states[target], self.saved = (len(head), chained(0, head)), self.saved + 1

    def _check_versions(self, batch: StepBatch) -> None:
        """What a runner may keep while the versions stay is what it would read again."""
        rows, slots = batch.page_table_rows[: batch.S], batch.state_slots[: batch.S]
        now = (batch.S, rows.tolist(), slots.tolist(), list(map(id, batch.sampling)))
        tables = batch.page_tables[batch.page_table_rows[: batch.S]].tolist()
        if self.seen and self.seen[0] == batch.version:
            assert self.seen[1] == now and batch.T == batch.S == batch.R
            assert batch.logits_indices[: batch.R].tolist() == list(range(batch.R))
            if self.seen[2] == batch.tables_version:
                assert self.seen[3] == tables
        self.seen = (batch.version, now, batch.tables_version, tables)

    def _history(self, batch: StepBatch, s: int) -> np.ndarray:
        first, last, length = (
            batch.query_start_loc[s],
            batch.query_start_loc[s + 1],
            batch.seq_lens[s],
        )
        at = np.arange(length)
        table = batch.page_tables[batch.page_table_rows[s]]
        slots = table[at // self.page_size] * self.page_size + at % self.page_size
        own = batch.positions[first:last]
        assert own.tolist() == list(range(length - (last - first), length))
        assert slots[own].tolist() == batch.slot_mapping[first:last].tolist()
        history = self.cache[slots]
        if self.window_pages:
            table = batch.window_tables[batch.page_table_rows[s]]
            at = at[max(0, own[0] - self.window + 1) :]  # what the first token sees, and the others
            slots = table[at // self.page_size] * self.page_size + at % self.page_size
            assert self.windowed[slots].tolist() == history[at].tolist(), "a page was given away"
        return history

    def _draw(self, history: np.ndarray, batch: StepBatch, s: int, how: SequenceSampling) -> int:
        seed, draws = int(batch.seeds[s]), int(batch.draws[s])
        before = self.drawn.setdefault(seed, [])
        assert seed == how.seed
        # Behind a draft, the token before it may be another than what was drawn.
        draft = s < batch.query_start_loc[batch.D] and s not in batch.query_start_loc[: batch.D]
        wrong = draft and history[len(history) - draws :].tolist() != before
        assert wrong or draws == len(before), "drawn twice, or not at all"
        assert wrong or history[len(history) - draws :].tolist() == before
        if how.counts is not None:
            self._check_counts(history, before, how)
        banned = how.bias_ids[how.bias_values <= np.float32(BANNED_BIAS)].tolist()
        never = {token for token, bias in how.params.logit_bias.items() if bias <= BANNED_BIAS}
        assert never.issuperset(banned) or draws < how.params.min_tokens
        token = draw(history, seed, draws, self.vocab_size)
        allowed = (
            None if how.mask is None else np.unpackbits(how.mask.view(np.uint8), bitorder="little")
        )
        while token in banned or (allowed is not None and not allowed[token]):
            token = (token + 1) % self.vocab_size
        if not wrong:
            before.append(token)
        return token

    def _check_counts(self, history: np.ndarray, output: list[int], how: SequenceSampling) -> None:
        counts = how.counts
        assert counts is not None
        ids, N = counts.ids.tolist(), counts.size
        assert set(ids[:N]) == set(history.tolist())
        assert counts.counts[:N].tolist() == [output.count(token) for token in ids[:N]]


def check_pages(manager: BlockManager, tables: Sequence[PageTable]) -> None:
    """Every page is free, kept by the tree alone, or counted by just the tables that name it."""
    pool, tree = manager.pool, manager.tree
    named = [page for table in tables for page in table.pages]
    assert pool.references == [named.count(page) for page in range(pool.num_pages)]
    assert len(pool) + tree.idle + len(set(named)) == pool.num_pages
    for node in tree._nodes.values():
        assert node.parent is None or tree._nodes[node.parent.key] is node.parent
    for table in tables:
        row = manager.tables[table.row, : len(table.pages)].tolist()
        assert table.row < 0 or row == table.pages


def check_windows(manager: BlockManager, tables: Sequence[PageTable]) -> None:
    """Every page of layers with a window is free, idle beside a page of the tree, or counted by
    just the sequences that have it; one that has ended has none."""
    windows, tree = manager.windows, manager.tree
    assert windows is not None
    own = [
        int(windows.tables[table.row, i])
        for table in tables
        for i in range(table.window_first, table.window_end)
    ]
    assert windows.pool.references == [own.count(page) for page in range(windows.pool.num_pages)]
    idle = [*windows._cold, *windows._warm]
    beside = [windows._beside[page] for page in idle]
    assert -1 not in beside and all(tree.has(page) for page in idle)
    every = [*windows.pool._free, *beside, *set(own)]
    assert sorted(every) == list(range(windows.pool.num_pages))


def slots_of(table: PageTable) -> tuple[int, int, int]:
    """What a sequence has, or -1."""
    return table.slot, table.saved, table.in_step


def check_states(runner: FakeRunner, manager: BlockManager, tables: Sequence[PageTable]) -> None:
    """Every slot is free, of one sequence or of one snapshot, which is of its page's tokens."""
    assert manager.snapshots is not None
    states = manager.snapshots.states
    own = [slot for table in tables for slot in slots_of(table) if slot >= 0]
    every = [*states._free, *own, *states._snapshots.values()]
    assert sorted(every) == list(range(runner.state_slots))
    coming = states.written.union(target for _, target in states.copies)
    for node, slot in states._snapshots.items():
        assert manager.tree._nodes[node.key] is node
        tokens: list[int] = []
        while node is not None:
            tokens, node = [*array("i", node.data), *tokens], node.parent
        wanted = len(tokens), chained(0, tokens)
        assert slot in coming or runner.states[slot] == wanted


class Words:
    """A detokenizer: token t is the t-th of its words; the last token brings one letter more."""

    REST = "c"

    def __init__(self, words: Sequence[str]) -> None:
        self.words = words

    def push(self, token: int) -> str:
        return self.words[token % len(self.words)]

    def finish(self) -> str:
        return self.REST


def text_of(tokens: Sequence[int], words: Sequence[str]) -> str:
    return "".join(words[token % len(words)] for token in tokens)
