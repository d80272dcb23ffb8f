"""Blocks on disk: what is read from them is what would be computed, or they are not used."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from pykernels.errors import PykernelsError
from runtime.engine import Engine, EngineConfig, SamplingParams
from runtime.kv_cache import BlockManager
from runtime.kv_cache.page_store import Bytes, Kind, aligned
from runtime.kv_cache.prefix import Held
from runtime.kv_tiers.blocks.block import HEADER, BlockName, why_damaged
from runtime.kv_tiers.blocks.contents import by_model, clear, damaged, opened
from runtime.kv_tiers.blocks.directory import blocks, prepared
from runtime.kv_tiers.blocks.folder import ModelFolder
from runtime.kv_tiers.blocks.ram import RamBlocks
from runtime.kv_tiers.blocks.readers import Readers
from runtime.kv_tiers.blocks.reading import Buffered, Direct, Way, fastest
from runtime.kv_tiers.levels import Levels
from runtime.kv_tiers.tiers import KvTiers

from .fake_runner import FakeRunner, check_pages, check_states, expected

LIMIT = 100 * 600
"""Bytes of about a hundred blocks."""
MODEL = bytes(range(16))


class FakePages:
    """The tokens that a ``FakeRunner`` has for keys and values, and its states; as a GPU's: what
    is read is not in its pages at once."""

    layout = "tokens"

    def __init__(self, runner: FakeRunner) -> None:
        self._runner = runner
        self._cache = runner.cache.reshape(runner.num_pages, -1).view(np.uint8)

    def nbytes(self, kind: Kind) -> int:
        return self._cache.shape[1] if kind is Kind.PAGE else 16 * bool(self._runner.states)

    def host(self, nbytes: int) -> Bytes:
        return np.empty(nbytes, np.uint8)

    def read(self, kind: Kind, place: int, out: Bytes) -> None:
        states = self._runner.states
        out[:] = self._cache[place] if kind is Kind.PAGE else np.array(states[place]).view("u1")

    def write(self, kind: Kind, place: int, data: Bytes) -> None:
        if kind is Kind.PAGE:
            self._cache[place] = data
        else:
            count, chain = data.view(np.int64).tolist()
            self._runner.states[place] = count, chain

    def space(self, kind: Kind, place: int) -> Sequence[memoryview] | None:
        return None


def tiers(
    runner: FakeRunner,
    path: Path,
    limit: int,
    model: bytes,
    ram: int,
    shared: bool,
    manager: BlockManager,
) -> KvTiers:
    """Which read whatever they can: nobody knows how long this runner would compute."""
    pages, about = FakePages(runner), {"model": "fake"}
    memory = RamBlocks(pages, ram) if ram else None
    levels = Levels(pages, ModelFolder(path, limit, model, about), memory, shared=shared)
    made = KvTiers(manager, levels, model)
    made.computed = lambda tokens, seconds: None  # type: ignore[method-assign]
    return made


def engine_on(
    path: Path,
    runner: FakeRunner,
    limit: int = 1 << 30,
    model: bytes = MODEL,
    ram: int = 0,
    threaded: bool = False,
    shared: bool = False,
) -> Engine:
    prepared(path)
    config = EngineConfig(snapshot_tokens=8) if runner.state_slots else EngineConfig()
    make = partial(tiers, runner, path, limit, model, ram, shared)
    return Engine(runner, threaded=threaded, config=config, tiers=make)


def greedy(seed: int, count: int) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=count)


def answered(engine: Engine, prompt: list[int], count: int = 6) -> int:
    """Tokens of the prompt that were not computed, of an answer that is right."""
    seed = engine.stats.finished + 1  # each request of a runner has its own
    (result,) = engine.generate([prompt], greedy(seed, count))
    assert result.token_ids == expected(prompt, seed, count)
    return result.completions[0].stats.cached_tokens


def damage(path: Path, rng: random.Random) -> None:
    """One file is not what it was."""
    data = bytearray(path.read_bytes())
    how = rng.randrange(4)
    if how == 0:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif how == 1:
        del data[rng.randrange(len(data)) :]
    elif how == 2:
        data += b"\0"
    else:  # whole, and another block
        others = [each for each in path.parent.iterdir() if each.suffix == path.suffix]
        data = bytearray(rng.choice(others).read_bytes())
    path.write_bytes(data)


@pytest.mark.parametrize("slots", [0, 6])
def test_a_restart_goes_on_where_the_last_turn_ended(slots: int, tmp_path: Path) -> None:
    chat = list(range(40))
    with engine_on(tmp_path, FakeRunner(state_slots=slots)) as engine:
        assert answered(engine, chat, 9) == 0
    chat += [*expected(chat, 1, 9), 7]
    with engine_on(tmp_path, FakeRunner(state_slots=slots)) as engine:
        assert answered(engine, chat) == 48, "the full pages of prompt and answer"
        level = engine.stats.kv_levels["disk"]
        assert level.read == 12 + bool(slots) and level.damaged == 0
    with engine_on(tmp_path, FakeRunner(state_slots=slots), model=bytes(16)) as engine:
        assert answered(engine, chat) == 0, "another model's"


@pytest.mark.parametrize(("slots", "ram"), [(0, 0), (9, 0), (0, 1000), (9, 1000)])
def test_nothing_wrong_is_served(slots: int, ram: int, tmp_path: Path) -> None:
    """Lives of an engine with few pages and a small directory, some of whose blocks are damaged in
    between, requests that end early, and steps that fail."""
    rng = random.Random(slots + ram)
    roots = [[rng.randrange(90) for _ in range(60)] for _ in range(3)]
    read = lost = number = 0
    for _ in range(6):
        runner = FakeRunner(num_pages=40, state_slots=slots, max_num_seqs=4)
        with engine_on(tmp_path, runner, limit=LIMIT, ram=ram) as engine:
            running = []
            for _ in range(12):
                root, number = rng.choice(roots), number + 1
                prompt = [*root[: rng.randrange(1, 60)], *map(rng.randrange, [90] * 3)]
                handle = engine.submit(prompt, greedy(number, rng.randrange(1, 20)))
                running.append((prompt, number, handle))
                for _ in range(rng.randrange(6)):
                    engine.step()
                if rng.random() < 0.2:
                    rng.choice(running)[2].cancel()
                if rng.random() < 0.05:
                    runner.fail_next = ValueError("a step that fails")
            for prompt, own, handle in running:
                try:
                    (done,) = handle.result().completions
                except (PykernelsError, ValueError):
                    continue
                assert done.token_ids == expected(prompt, own, len(done.token_ids))
            manager, level = engine._core.scheduler.manager, engine.stats.kv_levels["disk"]
            while engine._core.scheduler.loading:
                engine._core.scheduler.collect()
            check_pages(manager, [])
            if slots:
                check_states(runner, manager, [])
            read, lost = read + level.read, lost + level.damaged
        files = [Path(file.path) for file in blocks(tmp_path)]
        assert sum(path.stat().st_size for path in files) <= LIMIT
        for path in rng.sample(files, len(files) // 8):
            damage(path, rng)
    assert read and lost


def test_main_memory_is_asked_before_the_disk(tmp_path: Path) -> None:
    """Pages for one conversation, and main memory for three."""
    chats = [[i] * 30 for i in range(3)]

    def cached(engine: Engine) -> list[int]:
        found = []
        for chat in chats:
            found.append(answered(engine, chat))
            asked = engine._core.scheduler.tiers._worker._asked  # type: ignore[union-attr]
            while asked.writes or asked.copying:  # its pages are for the next one
                time.sleep(0.01)
        return found

    with engine_on(tmp_path, FakeRunner(num_pages=12), ram=30 * 32) as engine:
        assert cached(engine) == [0] * 3 and cached(engine) == [28] * 3
        levels = engine.stats.kv_levels
        assert (levels["ram"].read, levels["disk"].read) == (21, 0)
    with engine_on(tmp_path, FakeRunner(num_pages=12), ram=30 * 32) as engine:
        assert cached(engine) == [28] * 3 and cached(engine) == [28] * 3
        levels = engine.stats.kv_levels  # what comes from disk stays in main memory
        assert (levels["ram"].read, levels["disk"].read) == (21, 21)


def test_main_memory_has_whole_files() -> None:
    """A store gets them as they are."""
    tokens = np.arange(4, dtype=np.int32).tobytes()
    block = BlockName(Kind.PAGE, MODEL, b"k" * 16, bytes(16), tokens)
    ram = RamBlocks(FakePages(FakeRunner()), 10 << 10, HEADER)
    ram.room(Kind.PAGE)[:] = range(32)
    ram.keep(block)
    value = ram.value(block)
    assert value is not None and why_damaged(value.tobytes(), block.file) is None
    value[-1] ^= 1
    assert why_damaged(value.tobytes(), block.file) == "its checksum is wrong"


def read_again(engine: Engine, chats: Sequence[list[int]], blocks: int) -> list[int]:
    """Tokens of prompts that were not computed, of requests that waited while another one ran.

    Args:
        blocks: that are read from disk meanwhile, at most 15 before the next request comes.
    """
    level = lambda: engine.stats.kv_levels["disk"].read  # noqa: E731
    running = engine.submit([blocks] * 20, greedy(1, 40))
    waiting = []
    for i, chat in enumerate(chats):
        engine.step()
        waiting.append(engine.submit(chat, greedy(2 + i, 3)))
        for _ in range(20):
            if level() < min(blocks, 15 * (i + 1)):
                engine.step()
                time.sleep(0.01)
    assert level() == blocks and engine.stats.finished == 0
    running.result()
    answers = [handle.result().completions[0] for handle in waiting]
    for i, (chat, answer) in enumerate(zip(chats, answers, strict=True)):
        assert answer.token_ids == expected(chat, 2 + i, 3)
    return [answer.stats.cached_tokens for answer in answers]


def test_what_waits_is_read_beside_steps(tmp_path: Path) -> None:
    chats = [[i] * 61 for i in range(3)]
    with engine_on(tmp_path, FakeRunner()) as engine:
        assert [answered(engine, chat) for chat in chats] == [0] * 3
    # Pages for the one that runs and another one: what is read for the second pushes out nothing of
    # the first.
    with engine_on(tmp_path, FakeRunner(num_pages=35, max_num_seqs=1)) as engine:
        assert read_again(engine, chats, 15) == [60] * 3
    # For that one alone: blocks come to main memory.
    with engine_on(tmp_path, FakeRunner(num_pages=20), ram=100 * 32) as engine:
        assert read_again(engine, chats, 45) == [60] * 3
        assert engine.stats.kv_levels["disk"].read == 45
    # No seat, and somebody must be asked for blocks.
    with engine_on(tmp_path / "2", FakeRunner(max_num_seqs=1), shared=True) as engine:
        with engine_on(tmp_path / "2", FakeRunner()) as other:
            assert answered(other, chats[0]) == 0
        assert read_again(engine, chats[:1], 15) == [60]


def test_what_is_faster_to_compute_is_not_read(tmp_path: Path) -> None:
    chats = [[i] * 30 for i in range(3)]
    with engine_on(tmp_path, FakeRunner()) as engine:
        assert [answered(engine, chat) for chat in chats] == [0] * 3
    with engine_on(tmp_path, FakeRunner()) as engine:
        assert answered(engine, chats[0]) == 28, "nothing is known yet"
        tiers = engine._core.scheduler.tiers
        assert tiers is not None
        KvTiers.computed(tiers, 10**9, 1.0)
        assert answered(engine, chats[1]) == 0
        assert engine.stats.kv_levels["disk"].declined == 7
        tiers.shared = True
        assert not tiers.held([bytes(16)]).takes
        tiers._compute_rate.value = 1e-3
        assert tiers.held([bytes(16)]) == Held(0)
        tiers.shared = False
        assert answered(engine, chats[2]) == 28
        KvTiers.computed(tiers, 10**9, 1.0)
        assert answered(engine, [7] * 30) == 0
    with engine_on(tmp_path, FakeRunner()) as engine:
        assert answered(engine, [7] * 30) == 0, "it was not worth writing"


def test_blocks_that_are_cleared_are_computed(tmp_path: Path) -> None:
    """Beside an engine that goes on to write others."""
    with engine_on(tmp_path, FakeRunner()) as engine:
        answered(engine, [1] * 30)
    with engine_on(tmp_path, FakeRunner()) as engine:
        clear(tmp_path)
        assert answered(engine, [1] * 30) == 0
    with engine_on(tmp_path, FakeRunner()) as engine:
        assert answered(engine, [1] * 30) == 28


def test_no_page_is_filled_that_a_running_step_may_write(tmp_path: Path) -> None:
    """As that of a request that is cancelled while its prompt is read."""
    chat = list(range(40))
    with engine_on(tmp_path, FakeRunner()) as engine:
        answered(engine, chat)
    with engine_on(tmp_path, FakeRunner(num_pages=16)) as engine:
        gone = engine.submit([5] * 50, greedy(1, 2))
        engine.step()  # the next one runs
        gone.cancel()
        kept = engine.submit(chat, greedy(2, 6))
        engine._loop.obey()
        time.sleep(0.1)  # for whatever would read now
        (done,) = kept.result().completions
        assert done.token_ids == expected(chat, 2, 6) and done.stats.cached_tokens == 36


def test_two_engines_share_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.kv_tiers.blocks.folder._LOOK_SECONDS", 0)
    with (
        engine_on(tmp_path, FakeRunner()) as first,
        engine_on(tmp_path, FakeRunner()) as second,
    ):
        chats = [[i] * 30 for i in range(4)]
        for chat in chats:
            assert answered(first, chat) == 0
        first.close()
        assert answered(second, [99] * 30) == 0, "it looks for what others have written"
        second._core.scheduler.tiers._worker._thread.join(0.2)  # type: ignore[union-attr]
        assert [answered(second, chat) for chat in chats] == [28] * 4


def test_a_full_disk_is_told_once_and_requests_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.writev", full)
    with engine_on(tmp_path, FakeRunner()) as engine:
        assert [answered(engine, [i] * 30) for i in range(3)] == [0, 0, 0]
    assert not list(tmp_path.rglob("new-*")) and not list(blocks(tmp_path))
    (line,) = caplog.messages
    assert "cannot be written: No space left on device" in line


def test_a_directory_of_something_else_is_refused(tmp_path: Path) -> None:
    assert EngineConfig(kv_disk=str(tmp_path)).kv_disk == tmp_path  # type: ignore[arg-type]
    with pytest.raises(PykernelsError, match="no blocks"):
        clear(tmp_path)
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(PykernelsError, match="holds other files"):
        prepared(tmp_path)
    with pytest.raises(PykernelsError, match="Not a directory"):
        prepared(tmp_path / "thesis.tex" / "kv")
    with pytest.raises(PykernelsError, match="room for"):
        prepared(tmp_path / "kv", 1 << 60)


def test_blocks_are_listed_checked_and_removed(tmp_path: Path) -> None:
    with engine_on(tmp_path, FakeRunner(state_slots=6)) as engine:
        answered(engine, [5] * 30)
    opened(tmp_path)
    (found,) = by_model(tmp_path)
    files = list(blocks(tmp_path))
    assert found.pages + found.states == len(files) and found.pages == 8
    damage(Path(files[0].path), random.Random(0))
    assert [each.path for each in damaged(tmp_path) if each] == [Path(files[0].path)]
    assert clear(tmp_path) > 0 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("way", [Buffered(), Direct()], ids=lambda way: way.name)
@pytest.mark.parametrize("rest", [8192, 8488], ids=["sectors", "bytes"])
def test_each_way_reads_a_file_whole(way: Way, rest: int, tmp_path: Path) -> None:
    nbytes = 512 + rest
    data, path = random.Random(0).randbytes(nbytes), tmp_path / "file"
    for size in (nbytes - 1, nbytes, nbytes + 1):
        path.write_bytes((data + b"x")[:size])
        head, tail = aligned(512), aligned(rest)
        way.prefetch(path)
        try:
            found = way.read(path, [head.data, tail.data])
        except OSError:
            assert way.name == "direct"
            pytest.skip("this file system has no O_DIRECT")
        assert found == size
        assert size != nbytes or head.tobytes() + tail.tobytes() == data
    assert fastest(tmp_path, nbytes).name in ("buffered", "direct")
    assert list(tmp_path.iterdir()) == [path], "what was measured with is gone"


def test_what_was_begun_and_is_not_wanted_is_not_written_later(tmp_path: Path) -> None:
    """To pages that may be others' by then."""

    class Slow(Buffered):
        def read(self, path: Path, space: Sequence[memoryview]) -> int:
            time.sleep(0.05)
            return super().read(path, space)

    prepared(tmp_path)
    folder = ModelFolder(tmp_path, 1 << 20, MODEL, {}, Slow())
    named = [BlockName(Kind.PAGE, MODEL, bytes([i] * 16), bytes(16), bytes(16)) for i in range(8)]
    for block in named:
        folder.write(block, memoryview(block.key), 0)
    readers, pages = Readers(folder), np.zeros((8, 16), np.uint8)
    for block, page in zip(named, pages, strict=True):
        readers.begin(block, [page.data])
    assert readers.take(named[0]) == "whole" and not pages[0].any()
    assert readers.take(named[1]) == "whole" and pages[1].tobytes() == named[1].key
    readers.settle()
    pages[:] = 99
    time.sleep(0.15)
    assert (pages == 99).all()
    readers.close()
