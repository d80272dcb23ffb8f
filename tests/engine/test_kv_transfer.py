"""Blocks from one engine's memory to another's by Mooncake's Transfer Engine, without a store."""

from __future__ import annotations

import pytest

from pykernels.errors import PykernelsError
from runtime.engine import Engine, EngineConfig
from runtime.kv_cache.page_store import Kind
from runtime.kv_tiers.blocks.block import header_bytes
from runtime.kv_tiers.levels import Levels
from runtime.kv_tiers.tiers import KvTiers
from runtime.kv_tiers.transfer.blocks import TransferBlocks
from runtime.kv_tiers.transfer.endpoint import Peer, check_transfer

from .fake_runner import FakeRunner
from .test_kv_tiers import MODEL, FakePages, answered


def engine_with(slots: int, limit: int = 1 << 20) -> tuple[Engine, TransferBlocks]:
    pytest.importorskip("mooncake.engine", exc_type=ImportError)
    runner = FakeRunner(state_slots=slots)
    pages = FakePages(runner)
    blocks = TransferBlocks("127.0.0.1", limit, MODEL, pages, runner.page_size)
    levels = Levels(pages, None, None, blocks, shared=True)
    config = EngineConfig(snapshot_tokens=8) if slots else EngineConfig()

    def make(manager: object) -> KvTiers:
        tiers = KvTiers(manager, levels, MODEL, shared=True)  # type: ignore[arg-type]
        tiers.computed = lambda tokens, seconds: None  # type: ignore[method-assign]
        return tiers

    return Engine(runner, threaded=False, config=config, tiers=make), blocks


@pytest.mark.parametrize("slots", [0, 30])
def test_another_node_has_read_it(slots: int) -> None:
    """What is damaged there, or is of a node that has gone, is computed."""
    chats = [[i] * 30 for i in range(4)]
    first, lent = engine_with(slots)
    second, blocks = engine_with(slots)
    with first, second:
        assert [answered(first, chat) for chat in chats] == [0] * 4
        worker = first._core.scheduler.tiers._worker  # type: ignore[union-attr]
        while worker._asked.any:
            first._core._settle()
        assert answered(second, chats[0]) == 0, "nobody has told of the other node"
        blocks.meet([lent.peer])
        assert answered(second, chats[1]) == 28
        layout = lent.lent.layout
        pages = range(layout.slots[Kind.PAGE])
        firsts = [layout.offset(Kind.PAGE, slot) + header_bytes(16) for slot in pages]
        lent.lent.memory[firsts] ^= 1
        assert answered(second, chats[2]) == 0
        stats = second.stats.kv_levels["peers"]
        assert stats.read >= 7 and stats.damaged and not stats.failed
        lent.lent.memory[firsts] ^= 1
        lent._end.forget(lent.lent.memory.ctypes.data)
        assert answered(second, chats[3]) == 0
        lent._end.register(lent.lent.memory.ctypes.data, len(lent.lent.memory))


def test_what_others_have_not_copied_yet_does_not_give_way() -> None:
    """The beginning of a prompt that is longer than the memory is of use, its end alone is not."""
    first, lent = engine_with(0, limit=4096)
    with first:
        answered(first, [1] * 60)
        worker = first._core.scheduler.tiers._worker  # type: ignore[union-attr]
        while worker._asked.any:
            first._core._settle()
        slots = lent.lent.layout.slots[Kind.PAGE]
        keys = [key for key, _ in first_keys(slots + 1)]
        held = first.held(keys)
        assert held.stored == slots < 60 // 4 and not held.storing
        assert first.stats.kv_levels["peers"].dropped


def first_keys(pages: int) -> list[tuple[bytes, bytes]]:
    from runtime.kv_cache.prefix import extend_keys

    keys: list[tuple[bytes, bytes]] = []
    extend_keys(keys, [1] * 60, pages, 4)
    return keys


def test_an_address_is_checked() -> None:
    for host, told in (
        ("203.0.113.7", "203.0.113.7 is no address of this machine"),
        ("0.0.0.0", "0.0.0.0 is every address of this machine"),
        ("no such host", "no such host is no address of this machine"),
    ):
        with pytest.raises(PykernelsError, match=told):
            check_transfer(host)
    with pytest.raises(ValueError, match="is no node's memory"):
        Peer("somewhere", "00", 4096, 1, 0)
