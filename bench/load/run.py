"""A run: reading, loading and mapping the same weights, cold and warm, each in a new process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import model
from bench.harness.timing.rows import Row
from bench.peers.client import PeerMissing
from bench.peers.gguf_files.types import TYPES
from bench.peers.gguf_files.write import FAMILIES, model_file
from bench.peers.llama_tools import ToolMissing, find
from model.checkpoint.packed.populate import resident
from pykernels.errors import PykernelsError

from .child import files_of

Step = Callable[[str], None]
CONVERT, _PACKED = "convert, written and synced", "packed cache"
PEER = "llama.cpp, process and one token"
CACHES = ("cold", "warm")
"""None of the files' pages are in memory, or all are."""


@dataclass(frozen=True)
class Loads:
    """One way of loading to time.

    Attributes:
        source: the checkpoint; ``packed``: where its cache goes, or is already.
        convert: format of the experts; None: as stored.
        rounds: of which the fastest counts.
    """

    source: Path
    packed: Path
    threads: int
    convert: str | None = None
    rounds: int = 1

    @property
    def plan(self) -> list[Row]:
        """Lists, for each row, the columns that name it."""
        names = [
            CONVERT,
            f"read {self._stored}",
            f"read {self._stored} into new memory",
            f"load {self._stored}",
            f"read {_PACKED}",
            f"load {_PACKED}",
        ]
        return [{"what": name} for name in names]

    @property
    def _stored(self) -> str:
        return "GGUF" if files_of(self.source)[0].suffix == ".gguf" else "safetensors"

    def rows(self, step: Step) -> Iterator[Row]:
        """Reading and loading of the checkpoint, then of its cache."""
        step("converting")
        start = time.perf_counter()
        parts = model.convert(
            self.source, self.packed, self.convert, threads=self.threads, progress=False
        )
        written = sum(part.nbytes for part in parts)
        seconds = round(time.perf_counter() - start, 2)
        yield {"what": CONVERT, "bytes": written, "warm_s": seconds}
        fmt = [] if self.convert is None else [self.convert]
        stored = self._stored
        for name, folder, options in (
            (stored, self.source, fmt),
            (_PACKED, self.packed, []),
        ):
            plain = self._row(f"read {name}", "read", folder, [], step)
            yield plain
            if name == stored:  # what is loaded from it takes new memory; a cache is mapped
                plain = self._row(f"read {name} into new memory", "keep", folder, [], step)
                yield plain
            loaded = self._row(f"load {name}", "load", folder, options, step)
            for cache in CACHES:
                if f"{cache}_s" in loaded:
                    ratio = loaded[f"{cache}_s"] / plain[f"{cache}_s"]
                    loaded[f"{cache}_over_reading"] = round(ratio, 2)
            yield loaded

    def _row(self, what: str, kind: str, folder: Path, options: list[str], step: Step) -> Row:
        row: Row = {"what": what}
        files = files_of(folder)
        for cache in CACHES:
            seconds = []
            for _ in range(self.rounds):
                step(f"{what}, {cache}")
                if not prepare(files, cache):
                    break
                found = self._child(kind, folder, options)
                seconds.append(found["seconds"])
                row["bytes"] = found["bytes"]
                if "peak" in found:
                    row["final_bytes"] = found["final"]
                    row["peak_bytes"] = max(row.get("peak_bytes", 0), found["peak"])
            if seconds:
                row[f"{cache}_s"] = round(min(seconds), 3)
                row[f"{cache}_gbps"] = round(row["bytes"] / min(seconds) / 1e9, 2)
        return row

    def _child(self, kind: str, folder: Path, options: list[str]) -> Row:
        words = [sys.executable, "-m", "bench.load.child", kind, str(folder), str(self.threads)]
        done = subprocess.run([*words, *options], capture_output=True, text=True)
        if done.returncode:
            last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
            raise PykernelsError(f"loading {folder} failed: {''.join(last)}", "Load it by itself")
        row: Row = json.loads(done.stdout)
        return row


def prepare(files: list[Path], cache: str) -> bool:
    """Puts files out of the page cache, or into it; whether they are (a tmpfs keeps them)."""
    for file in files:
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
            if cache == "cold":
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while cache == "warm" and stream.read(1 << 24):
                pass
    sizes = {file: file.stat().st_size for file in files}
    mapped = [
        torch.from_file(str(file), shared=False, size=size, dtype=torch.uint8)
        for file, size in sizes.items()
    ]
    share = sum(map(resident, mapped)) / sum(sizes.values())
    return cache == "warm" or share < 0.02


def llama_cpp(config: Any, fmt: str, folder: Path, name: str, threads: int, step: Step) -> Row:
    """Its load of a GGUF file of these shapes: a process of `llama-bench`, one token included.

    Raises:
        PeerMissing, ToolMissing: why it is not timed.
    """
    program = find("llama-bench")
    if config.model_type not in FAMILIES or fmt not in TYPES:
        raise PeerMissing(f"no GGUF file of {config.model_type} in {fmt} is written here")
    step("writing the GGUF file")
    file = model_file(config, fmt, folder, name)
    words = [str(program), "-m", str(file), "-t", str(threads), "-p", "1", "-n", "0", "-r", "1"]
    row: Row = {"what": PEER, "bytes": file.stat().st_size}
    for cache in CACHES:
        step(f"llama.cpp, {cache}")
        if not prepare([file], cache):
            continue
        start = time.perf_counter()
        done = subprocess.run([*words, "--no-warmup"], capture_output=True, text=True)
        if done.returncode:
            raise PeerMissing(f"llama-bench ended with {done.returncode}: {done.stderr[-120:]!r}")
        seconds = time.perf_counter() - start
        row[f"{cache}_s"] = round(seconds, 3)
        row[f"{cache}_gbps"] = round(row["bytes"] / seconds / 1e9, 2)
    return row


__all__ = ["Loads", "PeerMissing", "Row", "ToolMissing", "llama_cpp"]
