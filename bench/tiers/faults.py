"""python -m bench.tiers.faults: engines that are killed while they write blocks, and blocks that
are damaged; every page that is read, and every answer, is compared.

Engines of the embedded model answer conversations over one directory that is too small for all, one
engine after the other, each in a process of its own. Each is killed (SIGKILL) at a random call that
changes the directory: a file is made, written (then a part of it is there), closed, dated, renamed
or removed. What one has left the next one reads. Then as many blocks as were asked for are damaged,
and an engine is asked for all of their conversations. Each page that is read must be, byte for
byte, one that was written under its name, and each answer that of an engine without a directory, as
far as rounding does not decide it. One JSON object says what happened; the exit code is 1 if
anything wrong was served, anything hung, or a block was there in part.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.harness.keeping.provenance import provenance
from pykernels.errors import PykernelsError
from runtime.kv_tiers.blocks.contents import damaged
from runtime.kv_tiers.blocks.directory import NEW, blocks
from runtime.kv_tiers.stats import LevelStats
from runtime.planning.option import check_whole

from .life import answer, conversations, live, opened, sure_answer, watched

COUNT, LENGTH = 40, 300
"""Conversations of the engines that are killed, and tokens of each."""
LIMIT = 12 << 20
"""Bytes of their directory: about half of all blocks."""
SHORT = 65
"""Tokens of a conversation that has one full page, at least."""
HANGS_SECONDS = 300
LATEST = 150
"""Calls that change the directory, of which one is an engine's last."""


def killed(folder: Path, kills: int, rng: random.Random) -> dict[str, Any]:
    """Engines that are killed, one after the other."""
    prompts = conversations(COUNT, LENGTH)
    with opened(None) as llm:
        right = [sure_answer(llm, prompt) for prompt in prompts]
    served = Served()
    counts, points = Counter[str](), Counter[str]()
    context = get_context("forkserver")
    context.set_forkserver_preload([live.__module__])
    while sum(points.values()) < kills:
        here, there = context.Pipe(duplex=False)
        given = folder, LIMIT / 2**30, prompts, rng.randrange(1 << 30), rng.randrange(1, LATEST)
        engine = context.Process(target=live, args=(*given, there))
        engine.start()
        there.close()
        counts["hung"] += not _heard(here, right, served, points)
        engine.kill()
        engine.join()
        if not sum(points.values()) % 10:
            print(f"{sum(points.values())} of {kills} engines are killed", file=sys.stderr)
        counts["torn"] += sum(each is not None for each in damaged(folder))
    size = sum(file.nbytes for file in blocks(folder))
    left = sum(path.name.startswith(NEW) for path in folder.rglob("*"))
    return {
        "kills": sum(points.values()),
        **{f"killed_at_{name}": points[name] for name in POINTS},
        "answers": served.counts["answers"],
        "tokens_compared": served.counts["tokens"],
        "wrong_answers": served.counts["wrong answers"],
        "pages_read": served.counts["read"],
        "wrong_pages": served.counts["wrong pages"],
        "hung": counts["hung"],
        "torn_blocks": counts["torn"],
        "unfinished_files": left,
        "directory_over_limit": round(size / LIMIT, 3),
    }


POINTS = ("open", "writev", "close", "utime", "replace", "unlink")


@dataclass
class Served:
    """What engines have served.

    Attributes:
        written: checksums of the pages that were written under a name.
    """

    written: dict[str, set[int]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    def page(self, told: tuple[str, str, int]) -> None:
        """See ``watched``."""
        what, name, checksum = told
        if what == "wrote":
            self.written.setdefault(name, set()).add(checksum)
        else:
            self.counts["read"] += 1
            self.counts["wrong pages"] += checksum not in self.written.get(name, ())

    def answer(self, found: list[int], sure: list[int]) -> None:
        """Counts an answer of a conversation, and whether it is right."""
        self.counts["answers"] += 1
        self.counts["tokens"] += len(sure)
        self.counts["wrong answers"] += found[: len(sure)] != sure


def _heard(
    told: Connection, right: Sequence[list[int]], served: Served, points: Counter[str]
) -> bool:
    """Whether an engine came to its end, and has told of all until then."""
    try:
        while told.poll(HANGS_SECONDS):
            what, *rest = told.recv()
            if what == "answer":
                i, found = rest
                served.answer(found, right[i])
            elif what == "killed":
                points[rest[0]] += 1
            elif what != "end":
                served.page((what, *rest))
    except EOFError:
        return True
    return False


def damaged_blocks(folder: Path, count: int, rng: random.Random) -> dict[str, Any]:
    """As many damaged blocks, each the only one of its conversation."""
    prompts = conversations(count, SHORT)
    with opened(None) as llm:
        right = [sure_answer(llm, prompt) for prompt in prompts]
    served = Served()

    def ask_all() -> LevelStats:
        with opened(folder) as llm:
            for prompt, sure in zip(prompts, right, strict=True):
                served.answer(answer(llm, prompt), sure)
            return llm.engine.stats.kv_levels["disk"]

    with watched(served.page):
        ask_all()
        files = [Path(file.path) for file in blocks(folder)]
        whole = {path: path.read_bytes() for path in files}
        for path in files:
            path.write_bytes(_damage(whole[path], rng.choice(files), whole, rng))
        changed = sum(path.read_bytes() != whole[path] for path in files)
        found = sum(each is not None for each in damaged(folder))
        level = ask_all()
        again = ask_all()  # those that were written again, whole
    return {
        "damaged_blocks": changed,
        "found_by_verify": found,
        "found_by_the_engine": level.damaged,
        "read_whole_afterwards": again.read,
        "damaged_answers": served.counts["answers"],
        "damaged_wrong_answers": served.counts["wrong answers"],
        "damaged_wrong_pages": served.counts["wrong pages"],
    }


def _damage(data: bytes, other: Path, whole: dict[Path, bytes], rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    bit = bytes([data[at] ^ 1 << rng.randrange(8)])
    ways = (
        data[:at] + bit + data[at + 1 :],
        data[:at],
        data + b"\0",
        bytes(len(data)),
        data[:at] + bytes(len(data) - at - 1) + b"\xff",
        whole[other],
    )
    return rng.choice(ways)


def main() -> int:
    parser = argparse.ArgumentParser("python -m bench.tiers.faults", description=__doc__)
    whole: dict[str, Any] = {"type": int, "metavar": "N"}
    parser.add_argument("--kills", default=100, help="of engines that write (100)", **whole)
    parser.add_argument("--damaged", default=1000, help="blocks (1000)", **whole)
    parser.add_argument("--seed", default=1, **whole)
    parser.add_argument("--kv-disk", type=Path, metavar="DIR", help="on the disk that is used")
    chosen = parser.parse_args()
    rng = random.Random(chosen.seed)
    try:
        for name in ("kills", "damaged"):
            check_whole(name, getattr(chosen, name), 1, 1 << 20)
        with ExitStack() as stack:
            parents = [tempfile.TemporaryDirectory(dir=chosen.kv_disk) for _ in range(2)]
            one, other = (Path(stack.enter_context(parent)) for parent in parents)
            found = killed(one, chosen.kills, rng) | damaged_blocks(other, chosen.damaged, rng)
    except PykernelsError as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{chosen.kv_disk}: {error.strerror}", file=sys.stderr)
        return 1
    print(json.dumps(provenance() | found))
    return int(any(count for name, count in found.items() if _is_fault(name)))


def _is_fault(name: str) -> bool:
    return "wrong" in name or name in ("hung", "torn_blocks")


if __name__ == "__main__":
    sys.exit(main())
