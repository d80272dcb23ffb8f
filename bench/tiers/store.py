"""python -m bench.tiers.store: blocks that cross to a Mooncake store and back, beside the rate of
Mooncake's own benchmark.

A master and a process that lends memory are started on this machine; blocks cross by TCP on
loopback, 64 at once, from main memory to the store and back, with their headers and checksums, as
the level of an engine has them (``runtime.kv_tiers``). In turns with that, `transfer_engine_bench`
writes and reads as many bytes at once from one thread, without a store. Each block is compared with
what was written. It prints the medians in GB/s, and what ours are of the benchmark's.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from runtime.kv_cache.page_store import Bytes, Kind
from runtime.kv_tiers.blocks.block import HEADER, BlockName
from runtime.kv_tiers.blocks.mooncake import MooncakeBlocks
from runtime.kv_tiers.blocks.ram import RamBlocks
from runtime.planning.option import check_whole

from .mooncake_programs import LEASE_SECONDS, engine_rate, engine_target, store
from .printed import printed

MODEL = bytes(16)
WARM = 4
"""Rounds that are not timed: one connects, and the store's memory is touched for the first time."""
GOOD = 0.8
"""Of the benchmark's rate."""


@dataclass
class _Pages:
    """Pages of so many bytes; nothing crosses to a device here."""

    page_bytes: int
    layout = "bytes"

    def nbytes(self, kind: Kind) -> int:
        return self.page_bytes if kind is Kind.PAGE else 0

    def host(self, nbytes: int) -> Bytes:
        return np.zeros(nbytes, np.uint8)

    def read(self, kind: Kind, place: int, out: Bytes) -> None:
        raise NotImplementedError

    def write(self, kind: Kind, place: int, data: Bytes) -> None:
        raise NotImplementedError

    def space(self, kind: Kind, place: int) -> Sequence[memoryview] | None:
        return None


def run(chosen: argparse.Namespace) -> dict[str, Any]:
    """The measurement. Raises PykernelsError."""
    for name, most in (("pages", 64), ("page_kib", 1 << 20), ("rounds", 1000), ("seconds", 600)):
        check_whole(name, getattr(chosen, name), 1, most)
    batch, nbytes = chosen.pages, chosen.page_kib << 10
    pages = _Pages(nbytes)
    rates: dict[str, list[float]] = {name: [] for name in ("put", "get", "te_write", "te_read")}
    wrong = 0
    with store(2 * batch * (nbytes + HEADER) + (64 << 20)) as url, engine_target() as target:
        ram = RamBlocks(pages, 2 * batch * (nbytes + HEADER), HEADER)
        blocks = MooncakeBlocks(url, 0, MODEL, pages, ram)
        try:
            for turn in range(WARM + chosen.rounds):
                put, get, lost = _crossed(blocks, ram, batch, turn)
                wrong += lost
                if turn >= WARM:
                    rates["put"].append(put)
                    rates["get"].append(get)
                time.sleep(1.2 * LEASE_SECONDS)
                blocks._store.remove_all()  # the next one finds memory that was used before
                if turn >= WARM and (turn - WARM) % max(1, chosen.rounds // 3) == 0:
                    for name in ("write", "read"):
                        rate = engine_rate(target, name, batch, nbytes, chosen.seconds)
                        rates[f"te_{name}"].append(rate)
        finally:
            blocks.close()
    found = {name: median(each) / 1e9 for name, each in rates.items()}
    return {
        "batch_pages": batch,
        "page_bytes": nbytes,
        "rounds": chosen.rounds,
        "put_gbps": round(found["put"], 3),
        "get_gbps": round(found["get"], 3),
        "engine_write_gbps": round(found["te_write"], 3),
        "engine_read_gbps": round(found["te_read"], 3),
        "put_over_engine": round(found["put"] / found["te_write"], 3),
        "get_over_engine": round(found["get"] / found["te_read"], 3),
        "good_if_at_least": GOOD,
        "wrong": wrong,
    }


def _crossed(
    blocks: MooncakeBlocks, ram: RamBlocks, batch: int, turn: int
) -> tuple[float, float, int]:
    """Bytes a second there and back, and how many blocks are not what they were."""
    rng = np.random.default_rng(turn)
    names = [
        BlockName(Kind.PAGE, MODEL, rng.bytes(16), bytes(16), bytes(256)) for _ in range(batch)
    ]
    for name in names:
        room = ram.room(Kind.PAGE)
        room[:] = rng.integers(0, 256, len(room), np.uint8)
        ram.keep(name)
    data = [own for name in names if (own := ram.find(name)) is not None]
    sent = [own.copy() for own in data]
    began = time.perf_counter()
    done = blocks.write_all(names, data)
    put = time.perf_counter() - began
    for name in names:
        ram.drop(name)
    began = time.perf_counter()
    blocks.prefetch(names)
    got = [blocks.read(name) for name in names]
    get = time.perf_counter() - began
    wrong = sum(
        found != "whole" or not np.array_equal(own, was)
        for (found, own), was in zip(got, sent, strict=True)
    )
    for name in names:
        ram.drop(name)
    return sum(done) / put, sum(map(len, sent)) / get, wrong


def main() -> int:
    parser = argparse.ArgumentParser("python -m bench.tiers.store", description=__doc__)
    whole: dict[str, Any] = {"type": int, "metavar": "N"}
    parser.add_argument("--pages", default=64, help="of a batch (64)", **whole)
    parser.add_argument("--page-kib", default=1024, help="KiB of a page (1024)", **whole)
    parser.add_argument("--rounds", default=12, help="of ours (12)", **whole)
    parser.add_argument("--seconds", default=3, help="of each of three runs of theirs (3)", **whole)
    parser.add_argument("--json", action="store_true", help="one object, with how it was made")
    chosen = parser.parse_args()
    return printed(partial(run, chosen), chosen.json)


if __name__ == "__main__":
    sys.exit(main())
