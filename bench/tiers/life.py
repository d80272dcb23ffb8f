"""The life of an engine over a directory of blocks, which ends at a point of writing."""

from __future__ import annotations

import os
import random
import signal
import threading
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import takewhile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

import model
from model.llm import LLM
from runtime.engine import SamplingParams
from runtime.engine.requests.outputs import TokenLogprob
from runtime.kv_cache.page_store import Bytes
from runtime.kv_tiers.blocks.block import BlockName
from runtime.kv_tiers.levels import Levels

TOKENS = 8
"""Of an answer."""
_SURE = 0.5
"""Lead that the likeliest token's log-probability must have: rounding may decide what is closer. It
differs between a prompt that is computed at once and one whose pages were computed before."""
LONGEST = 1024
"""Tokens of a conversation and its answer, at most."""
_THREAD = "kv blocks"
"""That writes (``runtime.kv_tiers.worker``)."""


def opened(folder: Path | None, gib: float | None = None) -> AbstractContextManager[LLM]:
    """An engine of the embedded model."""
    sizes: dict[str, Any] = {
        "max_model_len": LONGEST,
        "max_num_seqs": 1,
        "kv_tokens": 2 * LONGEST,
        "threads": 1,
    }
    return model.load_engine(model.EMBEDDED, kv_disk=folder, kv_disk_gib=gib, **sizes)


def answer(llm: LLM, prompt: list[int]) -> list[int]:
    """Greedy."""
    return [each.token for each in _written(llm, prompt)]


def sure_answer(llm: LLM, prompt: list[int]) -> list[int]:
    """What any right answer begins with: its tokens up to one that rounding may decide."""
    each = _written(llm, prompt)
    sure = takewhile(lambda token: token.top[0][1] - token.top[1][1] >= _SURE, each)
    return [token.token for token in sure]


def _written(llm: LLM, prompt: list[int]) -> Sequence[TokenLogprob]:
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=2)
    return llm.engine.generate([prompt], params)[0].completions[0].logprobs


def conversations(count: int, length: int, vocab: int = 4096) -> list[list[int]]:
    """Random tokens, of about so many each."""
    rng = random.Random(length)
    return [rng.choices(range(vocab), k=length + rng.randrange(60)) for _ in range(count)]


def live(
    folder: Path, gib: float, prompts: Sequence[list[int]], seed: int, die_at: int, told: Connection
) -> None:
    """Answers them in an order of its own, and kills itself in front of, or within, the so-maniest
    call that changes the directory. It tells of each answer, of each page that is written or read
    (``watched``), and of that call's name."""
    warnings.filterwarnings("ignore", "torch computes in one thread")
    lock, rng = threading.Lock(), random.Random(seed)

    def tell(what: Any) -> None:
        with lock:
            told.send(what)

    _die(die_at, rng, tell)
    with watched(tell), opened(folder, gib) as llm:
        for i in rng.sample(range(len(prompts)), len(prompts)):
            tell(("answer", i, answer(llm, prompts[i])))
    tell(("end", "", 0))


@contextmanager
def watched(tell: Callable[[tuple[str, str, int]], None]) -> Iterator[None]:
    """Tells of each page that is about to be written, or was read: its name, and a checksum of what
    lies in the page itself."""
    copy, read = Levels.copy, Levels.read

    def copied(self: Levels, block: BlockName, place: int) -> Bytes:
        data = copy(self, block, place)
        tell(("wrote", block.file, zlib.crc32(data.data)))
        return data

    def was_read(self: Levels, block: BlockName, place: int) -> bool:
        if not read(self, block, place):
            return False
        data = np.empty(self._pages.nbytes(block.kind), np.uint8)
        self._pages.read(block.kind, place, data)
        tell(("read", block.file, zlib.crc32(data.data)))
        return True

    with patch.object(Levels, "copy", copied), patch.object(Levels, "read", was_read):
        yield


def _die(at: int, rng: random.Random, tell: Callable[[tuple[str, str, int]], None]) -> None:
    left, files = [at], set[int]()

    def is_last() -> bool:
        left[0] -= 1
        return left[0] == 0

    def end(name: str) -> None:
        tell(("killed", name, 0))
        os.kill(os.getpid(), signal.SIGKILL)

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread().name != _THREAD:
                return call(*args, **kwargs)
            writes = name not in ("open", "close") or (
                args[1] & os.O_CREAT if name == "open" else args[0] in files
            )
            if writes and is_last():
                if name == "writev":  # some of it is written
                    data = b"".join(map(bytes, args[1]))
                    os.write(args[0], data[: rng.randrange(len(data))])
                end(name)
            found = call(*args, **kwargs)
            if name == "open" and writes:
                files.add(found)
            elif name == "close":
                files.discard(args[0])
            return found

        return changed

    for name in ("open", "writev", "close", "utime", "replace", "unlink"):
        setattr(os, name, counted(name, getattr(os, name)))
