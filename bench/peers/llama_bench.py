"""llama.cpp on a whole model: a process of its `llama-bench` or `llama-batched-bench` a figure."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from .client import PeerMissing
from .llama_tools import ON_CPU, ON_GPU, ToolMissing, Tools, find

SECONDS = 1200.0
"""The time limit of one process."""
UBATCHES = (512, 2048, 4096)
"""``-ub``: its default, and what users raise it to where experts cross the link for a prompt."""
_FLASH = ("on", "off")


@dataclass(frozen=True)
class Offload:
    """What of a model is on the GPU.

    Attributes:
        name: of this player.
        options: of the programs.
        tools: the build that has them.
        fits: whether ``-ncmoe`` is the lowest that fits in the GPU's memory (``llama_fit``).
    """

    name: str
    options: tuple[str, ...] = ()
    tools: Tools = ON_CPU
    fits: bool = False


CPU_ONLY = Offload("llama.cpp")
ON_THE_GPU = (
    Offload("llama.cpp -ncmoe 99", ("-ngl", "99", "-ncmoe", "99"), ON_GPU),  # as ours: all experts
    Offload("llama.cpp -ngl 99", ("-ngl", "99"), ON_GPU, fits=True),
)


@dataclass(frozen=True)
class Batching:
    """How a prompt is taken: so many tokens a step, and a call, with flash attention or without."""

    ub: int = 512
    b: int = 2048
    fa: str = "auto"

    @property
    def options(self) -> tuple[str, ...]:
        """Returns the options of `llama-bench`."""
        return ("-ub", str(self.ub), "-b", str(self.b), "-fa", self.fa)


DEFAULT = Batching()
"""What `llama-bench` does unless told otherwise; ``auto`` is with flash attention where the
backend has it."""


def batchings(tokens: int) -> list[Batching]:
    """Batchings that differ for a prompt: no ``-ub`` beyond the first that takes it in one step."""
    b = max(DEFAULT.b, *_sizes(tokens))
    return [Batching(ub, b, fa) for ub, fa in product(_sizes(tokens), _FLASH)]


def _sizes(tokens: int) -> list[int]:
    more = (ub for smaller, ub in pairwise(UBATCHES) if smaller < tokens)
    return [UBATCHES[0], *more]


def best_batching(model: Path, tokens: int, threads: int, offload: Offload = CPU_ONLY) -> Batching:
    """The fastest of ``batchings`` for one prompt, each timed once in one process after a warm-up.

    Raises:
        PeerMissing: it is not built, or failed.
    """
    tried = batchings(tokens)
    lists = {"-ub": map(str, _sizes(tokens)), "-fa": _FLASH}  # tried in this order
    words = ["-p", str(tokens), "-n", "0", "-b", str(tried[0].b)]
    words += [word for key, values in lists.items() for word in (key, ",".join(values))]
    rows = _rows(model, threads, 1, offload, *words)
    if [row.get("n_ubatch") for row in rows] != [batching.ub for batching in tried]:
        raise PeerMissing(f"llama-bench does not time {len(tried)} settings: {str(rows)[:80]}")
    rates = [_number(row, "avg_ts") for row in rows]
    return tried[rates.index(max(rates))]


def prefill(
    model: Path,
    tokens: int,
    threads: int,
    repeat: int = 1,
    offload: Offload = CPU_ONLY,
    batching: Batching = DEFAULT,
) -> float:
    """Tokens a second of one prompt (`-p`), after the program's own warm-up.

    Raises:
        PeerMissing: it is not built, or failed.
    """
    words = "-p", str(tokens), "-n", "0", *batching.options
    return _rate(model, threads, repeat, offload, *words)


def decode(
    model: Path,
    tokens: int,
    batch: int,
    context: int,
    threads: int,
    repeat: int = 1,
    offload: Offload = CPU_ONLY,
) -> float:
    """Tokens a second of ``batch`` sequences that go on from ``context`` tokens each.

    One sequence is `llama-bench -n -d`; several are `llama-batched-bench`, in all of whose figures
    a sequence begins with its own prompt.

    Raises:
        PeerMissing: it is not built, or failed.
    """
    if batch == 1:
        words = "-p", "0", "-n", str(tokens), "-d", str(context)
        return _rate(model, threads, repeat, offload, *words)
    positions = batch * (context + tokens + 1)
    lines = _run(
        "llama-batched-bench",
        offload,
        "-m",
        str(model),
        "-c",
        str(positions),
        "-npp",
        f"{context},1",
        "-ntg",
        str(tokens),
        "-npl",
        str(batch),
        "-t",
        str(threads),
        "--output-format",
        "jsonl",
    )
    # The program may end before its last line is written: a second, short case is asked for.
    rows = [json.loads(line) for line in lines.splitlines() if line.startswith("{")]
    return _number(next((row for row in rows if row.get("pp") == context), {}), "speed_tg")


def _rate(model: Path, threads: int, repeat: int, offload: Offload, *options: str) -> float:
    rows = _rows(model, threads, repeat, offload, *options)
    return _number(rows[-1] if rows else {}, "avg_ts")


def _rows(
    model: Path, threads: int, repeat: int, offload: Offload, *options: str
) -> list[dict[str, Any]]:
    """What `llama-bench` says of each test."""
    words = "-m", str(model), "-t", str(threads), "-r", str(repeat), "-o", "json"
    text = _run("llama-bench", offload, *words, *options)
    try:
        rows: list[dict[str, Any]] = json.loads(text)
    except ValueError:
        raise PeerMissing(f"llama-bench does not write JSON: {text[:80]!r}") from None
    return rows


def _number(row: dict[str, Any], key: str) -> float:
    try:
        rate = float(row[key])
    except (KeyError, TypeError, ValueError):
        raise PeerMissing(f"llama.cpp gives no {key}: {str(row)[:80]}") from None
    if rate <= 0:
        raise PeerMissing(f"llama.cpp gives {key} = {rate}")
    return rate


def _run(name: str, offload: Offload, *options: str) -> str:
    """What a program writes to stdout."""
    try:
        done = subprocess.run(
            [find(name, offload.tools), *offload.options, *options],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            errors="replace",
        )
    except ToolMissing as error:
        raise PeerMissing(str(error)) from None
    except subprocess.TimeoutExpired:
        raise PeerMissing(f"{name} ran for over {SECONDS:.0f} s") from None
    except OSError as error:
        raise PeerMissing(f"{name} cannot be started: {error.strerror}") from None
    if done.returncode:
        last = [line.strip() for line in done.stderr.splitlines() if line.strip()][-1:]
        raise PeerMissing(f"{name} ended with {done.returncode}: {''.join(last)[:120]}")
    return done.stdout
