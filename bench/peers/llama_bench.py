"""llama.cpp on a whole model: a process of its `llama-bench` or `llama-batched-bench` a figure."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .client import PeerMissing
from .llama_tools import ON_CPU, ON_GPU, ToolMissing, Tools, find

SECONDS = 1200.0
"""The time limit of one process."""


@dataclass(frozen=True)
class Offload:
    """What of a model is on the GPU.

    Attributes:
        name: of this player.
        options: of the programs.
        tools: the build that has them.
    """

    name: str
    options: tuple[str, ...] = ()
    tools: Tools = ON_CPU


CPU_ONLY = Offload("llama.cpp")
ON_THE_GPU = (
    Offload("llama.cpp -ncmoe 99", ("-ngl", "99", "-ncmoe", "99"), ON_GPU),
    Offload("llama.cpp -ngl 99", ("-ngl", "99"), ON_GPU),
)


def prefill(
    model: Path, tokens: int, threads: int, repeat: int = 1, offload: Offload = CPU_ONLY
) -> float:
    """Tokens a second of one prompt (`-p`), after the program's own warm-up.

    Raises:
        PeerMissing: it is not built, or failed.
    """
    return _rate(model, threads, repeat, offload, "-p", str(tokens), "-n", "0")


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
    room = batch * (context + tokens + 1)
    lines = _run(
        "llama-batched-bench",
        offload,
        "-m",
        str(model),
        "-c",
        str(room),
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
    text = _run(
        "llama-bench",
        offload,
        "-m",
        str(model),
        "-t",
        str(threads),
        "-r",
        str(repeat),
        "-o",
        "json",
        *options,
    )
    try:
        rows = json.loads(text)
    except ValueError:
        raise PeerMissing(f"llama-bench does not write JSON: {text[:80]!r}") from None
    return _number(rows[-1] if rows else {}, "avg_ts")


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
