"""python -m bench.tiers.disk DIR: blocks of a directory, read in order, beside `dd`.

Blocks are written and read as the level of an engine does it (``runtime.kv_tiers``): by the way
that is the fastest on this disk, several at once, with headers and checksums. In turns with that,
`dd` reads one file of as many bytes with the same block size, once through the page cache and once
past it; the faster one counts. Nothing of either is in the page cache when it is read. It prints
the medians in GB/s, and what ours are of dd's.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from pykernels.errors import PykernelsError
from runtime.kv_cache.page_store import Kind, aligned
from runtime.kv_tiers.blocks.block import BlockName
from runtime.kv_tiers.blocks.directory import prepared
from runtime.kv_tiers.blocks.folder import ModelFolder
from runtime.kv_tiers.blocks.readers import AHEAD, Readers
from runtime.kv_tiers.blocks.reading import fastest
from runtime.planning.option import check_whole

from .printed import printed

MODEL = bytes(16)


def run(root: Path, chosen: argparse.Namespace) -> dict[str, Any]:
    """The measurement, in a new folder of ``root``. Raises PykernelsError."""
    for name, most in (("blocks", 1 << 20), ("block_kib", 1 << 20), ("rounds", 1000)):
        check_whole(name, getattr(chosen, name), 1, most)
    if not root.is_dir():
        raise PykernelsError(f"there is no directory {root}", "Give one on the disk to be timed")
    count, nbytes = chosen.blocks, chosen.block_kib << 10
    rates: dict[str, list[float]] = {"blocks": [], "dd": [], "dd_direct": []}
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory(dir=root) as made:
        folder, one = Path(made) / "blocks", Path(made) / "one"
        limit = prepared(folder, 2 * count * nbytes)
        way = fastest(folder, nbytes)
        level = ModelFolder(folder, limit, MODEL, {}, way)
        names = [
            BlockName(Kind.PAGE, MODEL, rng.bytes(16), bytes(16), bytes(256)) for _ in range(count)
        ]
        sums = []
        with one.open("wb") as file:
            for block in names:
                data = rng.integers(0, 256, nbytes, np.uint8)
                level.write(block, memoryview(data.data), 0)
                file.write(data)
                sums.append(int(data.astype(np.uint64).sum()))
        _, wrong = _read(level, names, nbytes, sums)
        for _ in range(chosen.rounds):
            _forget([*(level.path / block.file for block in names), one])
            seconds, lost = _read(level, names, nbytes)
            rates["blocks"].append(count * nbytes / seconds)
            wrong += lost
            for kind, flag in (("dd", ()), ("dd_direct", ("iflag=direct",))):
                _forget([one])
                rates[kind].append(count * nbytes / _dd(one, nbytes, flag))
    found = {kind: median(each) / 1e9 for kind, each in rates.items()}
    best = max(found["dd"], found["dd_direct"])
    return {
        "blocks": count,
        "block_bytes": nbytes,
        "rounds": chosen.rounds,
        "way": way.name,
        "blocks_gbps": round(found["blocks"], 3),
        "dd_gbps": round(found["dd"], 3),
        "dd_direct_gbps": round(found["dd_direct"], 3),
        "blocks_over_dd": round(found["blocks"] / best, 3),
        "wrong": wrong,
    }


def _read(
    level: ModelFolder, names: list[BlockName], nbytes: int, sums: list[int] | None = None
) -> tuple[float, int]:
    """Seconds, and how many blocks are not what was written, as their checksums say, or these
    sums of their bytes; to add up takes time, too."""
    spaces = [aligned(nbytes) for _ in range(AHEAD)]
    for space in spaces:
        space[:] = 0  # memory that was used before
    readers, begun, wrong = Readers(level), 0, 0
    began = time.perf_counter()
    for i, block in enumerate(names):
        while begun < min(i + AHEAD, len(names)):
            readers.begin(names[begun], [spaces[begun % AHEAD].data])
            begun += 1
        whole = readers.take(block) == "whole"
        if sums is not None:
            whole &= int(spaces[i % AHEAD].astype(np.uint64).sum()) == sums[i]
        wrong += not whole
    seconds = time.perf_counter() - began
    readers.close()
    return seconds, wrong


def _dd(path: Path, nbytes: int, flags: tuple[str, ...]) -> float:
    """Seconds that `dd` takes for a file."""
    command = ["dd", f"if={path}", "of=/dev/null", f"bs={nbytes}", *flags]
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise PykernelsError(f"dd failed: {done.stderr.strip()}", "Give a directory on a disk")
    return time.perf_counter() - began


def _forget(paths: list[Path]) -> None:
    """Takes files out of the page cache."""
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def main() -> int:
    parser = argparse.ArgumentParser("python -m bench.tiers.disk", description=__doc__)
    whole: dict[str, Any] = {"type": int, "metavar": "N"}
    parser.add_argument("root", type=Path, metavar="DIR", help="on the disk")
    parser.add_argument("--blocks", default=256, help="that are read (256)", **whole)
    parser.add_argument("--block-kib", default=4096, help="KiB of a block (4096)", **whole)
    parser.add_argument("--rounds", default=9, help="of each (9)", **whole)
    parser.add_argument("--json", action="store_true", help="one object, with how it was made")
    chosen = parser.parse_args()
    return printed(partial(run, chosen.root, chosen), chosen.json)


if __name__ == "__main__":
    sys.exit(main())
