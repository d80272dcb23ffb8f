"""llama.cpp on a whole model, by its `llama-bench` and `llama-batched-bench`: one process loads the
model and times all that it is asked for."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .client import PeerMissing
from .llama_settings import AUTO, CPU_ONLY, Batching, Offload, grid
from .llama_tools import ToolMissing, find

SECONDS = 1200.0
"""The time limit of one process."""
_CAUSE = re.compile(r"GGML_ASSERT|error|failed", re.IGNORECASE)


def prompts(
    model: Path,
    tokens: int,
    threads: int,
    wanted: Sequence[Batching],
    offload: Offload = CPU_ONLY,
    repeat: int = 1,
    seconds: float = SECONDS,
) -> dict[Batching, float]:
    """Tokens a second of one prompt in each of ``grid(wanted)``, after a warm-up; where the time is
    over or one of them fails, of those that were timed by then.

    Raises:
        PeerMissing: it is not built, failed, or timed none.
    """
    timed = grid(wanted)
    lists = {
        "-ub": dict.fromkeys(str(one.ub) for one in timed),
        "-fa": dict.fromkeys(one.fa for one in timed),
    }
    if any(one.lm != AUTO for one in timed):  # which older programs have not
        lists["-lm"] = dict.fromkeys(one.lm for one in timed)
    words = ["-p", str(tokens), "-n", "0", "-b", str(timed[0].b)]
    words += [word for key, values in lists.items() for word in (key, ",".join(values))]
    rows = _rows(model, threads, repeat, offload, seconds, *words)
    if any(row.get("n_ubatch") != one.ub for row, one in zip(rows, timed, strict=False)):
        raise PeerMissing(f"llama-bench does not time {len(timed)} settings: {str(rows)[:80]}")
    rates = [_number(row, "avg_ts") for row in rows]
    return dict(zip(timed, rates, strict=False))


def decodes(
    model: Path,
    tokens: int,
    context: int,
    threads: Sequence[int],
    offload: Offload = CPU_ONLY,
    seconds: float = SECONDS,
) -> dict[int, float]:
    """Tokens a second of one sequence that goes on from ``context`` tokens, on each of some counts
    of threads; where the time is over or one fails, on those that were timed by then.

    Raises:
        PeerMissing: it is not built, failed, or timed none.
    """
    words = "-p", "0", "-n", str(tokens), "-d", str(context)
    rows = _rows(model, ",".join(map(str, threads)), 1, offload, seconds, *words)
    return {count: _number(row, "avg_ts") for count, row in zip(threads, rows, strict=False)}


def decode_many(
    model: Path,
    tokens: int,
    batch: int,
    context: int,
    threads: int,
    offload: Offload = CPU_ONLY,
    seconds: float = SECONDS,
) -> float:
    """Tokens a second of ``batch`` sequences that go on from ``context`` tokens each, by
    `llama-batched-bench`, in all of whose figures a sequence begins with its own prompt.

    Raises:
        PeerMissing: it is not built, or failed.
    """
    positions = batch * (context + tokens + 1)
    lines = _run(
        "llama-batched-bench",
        offload,
        seconds,
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
    rows = [row for row in _json_lines(lines) if row.get("pp") == context]
    return _number(rows[0] if rows else {}, "speed_tg")


def _rows(
    model: Path, threads: int | str, repeat: int, offload: Offload, seconds: float, *options: str
) -> list[dict[str, Any]]:
    """What `llama-bench` says of each test, one at least."""
    words = "-m", str(model), "-t", str(threads), "-r", str(repeat), "-o", "jsonl"
    text = _run("llama-bench", offload, seconds, *words, *options)
    if not (rows := _json_lines(text)):
        raise PeerMissing(f"llama-bench has timed nothing: {text[:80]!r}")
    return rows


def _json_lines(text: str) -> list[dict[str, Any]]:
    """The objects of whole lines; the last one may have been cut."""
    lines = text[: text.rfind("\n") + 1].splitlines()
    try:
        return [json.loads(line) for line in lines if line.startswith("{")]
    except ValueError:
        raise PeerMissing(f"llama.cpp does not write JSON: {text[:80]!r}") from None


def _number(row: dict[str, Any], key: str) -> float:
    try:
        rate = float(row[key])
    except (KeyError, TypeError, ValueError):
        raise PeerMissing(f"llama.cpp gives no {key}: {str(row)[:80]}") from None
    if rate <= 0:
        raise PeerMissing(f"llama.cpp gives {key} = {rate}")
    return rate


def _run(name: str, offload: Offload, seconds: float, *options: str) -> str:
    """What a program writes to stdout; where it fails or its time is over, until then."""
    try:
        done = subprocess.run(
            [find(name, offload.tools), *offload.options, *options],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            errors="replace",
        )
    except ToolMissing as error:
        raise PeerMissing(str(error)) from None
    except subprocess.TimeoutExpired as error:
        if error.stdout:  # bytes, whatever was asked for
            return bytes(error.stdout).decode(errors="replace")
        raise PeerMissing(f"{name} ran for over {seconds:.0f} s") from None
    except OSError as error:
        raise PeerMissing(f"{name} cannot be started: {error.strerror}") from None
    if done.returncode and "{" not in done.stdout:
        why = _why(done.stderr)
        raise PeerMissing(f"{name} ended with {done.returncode}: {why[:120]}")
    return done.stdout


def _why(stderr: str) -> str:
    """The line that says why a program ended: behind an assertion a debugger's lines follow."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    causes = [line for line in lines if _CAUSE.search(line)]
    return next(iter(causes[:1] or lines[-1:]), "")
