"""Pages and prefixes: what is shared is equal, what is free is free."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.kv_cache import BlockManager, PageTable, PrefixTree
from runtime.kv_cache.prefix import PrefixNode, extend_keys
from runtime.kv_cache.states import NO_SLOT, StateSlots

from .fake_runner import check_pages

PAGE = 2


@st.composite
def operations(make: st.DrawFn) -> list[tuple[str, int, list[int]]]:
    few = st.lists(st.integers(0, 1), min_size=1, max_size=9)  # two tokens: many equal prefixes
    kind = st.sampled_from(["admit", "grow", "grow", "release"])
    return make(st.lists(st.tuples(kind, st.integers(0, 3), few), max_size=60))


@settings(max_examples=200, deadline=None)
@given(operations())
def test_a_table_reads_back_its_own_tokens(steps: list[tuple[str, int, list[int]]]) -> None:
    manager = BlockManager(num_pages=8, page_size=PAGE, max_num_seqs=3, max_pages=20)
    tables = [PageTable() for _ in range(4)]
    tokens: list[list[int]] = [[] for _ in tables]
    cache: dict[int, int] = {}

    def compute(i: int, first: int) -> None:
        for p in range(first, len(tokens[i])):
            page = tables[i].pages[p // PAGE]
            assert manager.pool.references[page] == 1, "writes into a page of two sequences"
            cache[page * PAGE + p % PAGE] = tokens[i][p]
        manager.commit(tables[i], tokens[i], len(tokens[i]))

    for kind, i, more in steps:
        table = tables[i]
        if kind == "admit" and table.row < 0:
            # A new list of tokens is a new request.
            tables[i] = table = PageTable()
            free = manager.available
            if manager.admit(table, more):
                tokens[i] = list(more)
                assert table.cached * PAGE < len(more)
                compute(i, table.cached * PAGE)
            else:
                assert manager.available == free
        elif kind == "grow" and table.row >= 0:
            if len(tokens[i]) < len(table.pages) * PAGE or manager.extend(table):
                tokens[i].append(more[0])
                compute(i, len(tokens[i]) - 1)
        elif kind == "release":
            manager.release(table)
        check_pages(manager, tables)
        for table, own in zip(tables, tokens, strict=True):
            read = (
                [cache[table.pages[p // PAGE] * PAGE + p % PAGE] for p in range(len(own))]
                if (table.row >= 0)
                else own
            )
            assert read == own
    for table in tables:
        manager.release(table)
    assert manager.available == 8


def test_the_oldest_leaf_is_evicted_first() -> None:
    manager = BlockManager(num_pages=6, page_size=PAGE, max_num_seqs=2, max_pages=6)

    def run(tokens: list[int]) -> None:
        table = PageTable()
        assert manager.admit(table, tokens)
        manager.commit(table, tokens, len(tokens))
        manager.release(table)

    def cached(tokens: list[int]) -> int:
        keys: list[tuple[bytes, bytes]] = []
        extend_keys(keys, tokens, 2, PAGE)
        return len(manager.tree.match(keys, 2))

    run([1, 1, 2, 2])
    run([3, 3, 4, 4])
    run([1, 1, 9])  # touches the first page of the first
    run([5, 5, 6, 6, 7, 7])  # takes two free pages, and the oldest leaf
    assert (cached([1, 1, 2, 2]), cached([3, 3, 4, 4])) == (1, 2)
    run([8, 8, 8])  # takes the next two: a leaf and what has become one
    assert (cached([1, 1, 2, 2]), cached([3, 3, 4, 4])) == (1, 0)


def test_pages_that_two_computed_become_one() -> None:
    manager = BlockManager(num_pages=6, page_size=PAGE, max_num_seqs=2, max_pages=6)
    tables = [PageTable(), PageTable()]
    assert all(manager.admit(table, [1, 1, 2, 2]) for table in tables)
    for table in tables:
        manager.commit(table, [1, 1, 2, 2], 4)
    assert tables[0].pages == tables[1].pages and manager.available == 4
    check_pages(manager, tables)


def test_equal_keys_of_other_tokens_are_no_match() -> None:
    tree = PrefixTree()
    keys: list[tuple[bytes, bytes]] = []
    extend_keys(keys, [1, 2, 3, 4], 2, PAGE)
    first = tree.insert(None, keys[0], page=0)
    forged = (keys[0][0], keys[1][1])
    assert tree.find(None, forged) is None
    assert tree.insert(None, forged, page=1) is None
    assert tree.find(first, keys[0]) is None, "the same tokens behind another parent"


def test_a_long_prompt_has_snapshots_further_apart() -> None:
    """So that it does not drive out all others: four slots are for those of all prompts."""
    manager = BlockManager(64, PAGE, max_num_seqs=2, max_pages=64, state_slots=6, spacing=1)
    ends: list[int] = []
    for size in (6, 41):
        table = PageTable()
        assert manager.admit(table, list(range(size))) and manager.snapshots is not None
        while (end := manager.chunk_end(table)) is not None:
            ends.append(end)
            manager.commit(table, list(range(size)), end)
            manager.snapshots.reached(table, end, ends=False)
        manager.release(table)
    assert ends == [2, 4] + [16, 32, 40]
    assert manager.snapshots.states.snapshots == 5


def test_a_step_saves_the_state_of_a_page_on_its_way() -> None:
    manager = BlockManager(64, PAGE, max_num_seqs=2, max_pages=64, state_slots=4, spacing=1)
    snapshots, tokens, table = manager.snapshots, list(range(4 * PAGE + 1)), PageTable()
    assert snapshots is not None and manager.admit(table, tokens)
    snapshots.in_steps, table.marks = True, [4]
    assert manager.chunk_end(table) is None
    assert manager.save_in_step(table, 0, 3 * PAGE) == (0, NO_SLOT), "it ends in front of it"
    there = snapshots.states.available
    _, slot = manager.save_in_step(table, 0, len(tokens))
    snapshots.undo(table)
    assert snapshots.states.available == there
    assert manager.save_in_step(table, 0, len(tokens)) == (1, slot)
    manager.commit(table, tokens, len(tokens))
    [node] = snapshots.reached(table, len(tokens), ends=True)
    assert snapshots.states.slot_of(node) == slot != table.slot
    assert not snapshots.states.copies and not table.marks
    snapshots.states.drop(node)  # while the step runs
    apart = {snapshots.states.take_apart() for _ in range(4)}
    assert slot not in apart
    assert snapshots.states.take_copies() == []
    assert snapshots.states.take_apart() == slot


def test_nothing_is_adopted_behind_pages_that_were_forgotten() -> None:
    """A step fails whose pages a load from another level is to go on from."""
    manager = BlockManager(num_pages=8, page_size=PAGE, max_num_seqs=2, max_pages=8)
    tokens, table = list(range(2 * PAGE + 1)), PageTable()
    assert manager.admit(table, tokens)
    computed = manager.commit(table, tokens, 2 * PAGE)
    for keys in ([], [table.keys[1]]):
        hits = computed[: 2 - len(keys)]
        pages = manager.reserve(hits, len(keys), 0)
        assert pages is not None
        manager.forget(computed)
        assert manager.adopt(hits, keys, pages, len(keys)) is None
    manager.release(table)
    assert manager.available == 8
    check_pages(manager, [])


def test_a_slot_to_be_copied_is_not_written_meanwhile() -> None:
    """A snapshot is dropped, as that of a step that failed, before its copy is made."""
    states = StateSlots(4)
    own = states.take()
    node = PrefixNode(b"a", b"", None, 0)
    states.keep(node, states.save(own))
    forked = states.begin(node)
    states.drop(node)
    assert len(states.copies) == 2
    assert states.take_apart() not in (own, forked, states.copies[0][1])
    assert states.take_apart() == NO_SLOT
    states.take_copies()
    assert states.take_apart() != NO_SLOT
