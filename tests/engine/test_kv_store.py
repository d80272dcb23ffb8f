"""A Mooncake store on this machine: what one engine has read, another one need not."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from pykernels.errors import PykernelsError
from runtime.engine import Engine, EngineConfig
from runtime.kv_tiers.blocks.block import HEADER
from runtime.kv_tiers.blocks.directory import prepared
from runtime.kv_tiers.blocks.folder import ModelFolder
from runtime.kv_tiers.blocks.master import check_store
from runtime.kv_tiers.blocks.mooncake import MooncakeBlocks
from runtime.kv_tiers.blocks.ram import RamBlocks
from runtime.kv_tiers.levels import Levels
from runtime.kv_tiers.tiers import KvTiers

from ..mooncake import master
from .fake_runner import FakeRunner
from .test_kv_tiers import MODEL, FakePages, answered

__all__ = ["master"]


def engine_on(
    url: str, slots: int, disk: Path | None = None, lent: int = 0, ram: int = 0
) -> Engine:
    runner = FakeRunner(state_slots=slots)
    pages = FakePages(runner)
    folder = None
    if disk is not None:
        prepared(disk)
        folder = ModelFolder(disk, 1 << 30, MODEL, {})
    memory = RamBlocks(pages, ram, HEADER) if ram else None
    store = MooncakeBlocks(url, lent, MODEL, pages, memory)
    levels = Levels(pages, folder, memory, store)
    config = EngineConfig(snapshot_tokens=8) if slots else EngineConfig()

    def make(manager: object) -> KvTiers:
        tiers = KvTiers(manager, levels, MODEL)  # type: ignore[arg-type]
        tiers.computed = lambda tokens, seconds: None  # type: ignore[method-assign]
        return tiers

    return Engine(runner, threaded=False, config=config, tiers=make)


@pytest.mark.parametrize(("slots", "ram"), [(0, 0), (30, 40 << 10)])
def test_another_server_has_read_it(
    slots: int, ram: int, master: tuple[str, subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    url, process = master
    chats = [[i] * 30 for i in range(3)]
    with engine_on(url, slots, lent=64 << 20, ram=ram) as first:
        assert [answered(first, chat) for chat in chats] == [0] * 3
        worker = first._core.scheduler.tiers._worker  # type: ignore[union-attr]
        while worker._asked.any or worker.levels.late:
            first._core._settle()
        with engine_on(url, slots, tmp_path, ram=ram) as second:
            assert [answered(second, chat) for chat in chats[:2]] == [28] * 2
            assert second.stats.kv_levels["store"].read >= 14
            process.kill()
            process.wait()
            assert answered(second, [9] * 30) == 0, "a store that is gone is a miss"
            levels = second._core.scheduler.tiers._levels  # type: ignore[union-attr]
            assert levels.behind is not None and not levels.behind.names
    with pytest.raises(PykernelsError, match="no Mooncake master at 127.0.0.1"):
        check_store(url)


def test_an_address_is_checked() -> None:
    for url in ("http://host:1", "mooncake://host", "mooncake://host:99999"):
        with pytest.raises(PykernelsError, match=f"{url} is no address of a store"):
            MooncakeBlocks(url, 0, MODEL, FakePages(FakeRunner()))
