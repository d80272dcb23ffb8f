"""A server in two processes, as with a GPU: what it answers, and that neither outlives the
other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

ROOT = Path(__file__).parents[2]
ASKED = {"prompt": "def f(", "max_tokens": 4, "temperature": 0}


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], httpx2.Client]]:
    log = tmp_path / "log"
    with log.open("wb") as out:
        command = [
            sys.executable,
            "-m",
            "model.cli.main",
            "serve",
            "--device",
            "ref",
            "--port",
            "0",
        ]
        process = subprocess.Popen(command, cwd=ROOT, stderr=out)
    try:
        end = time.monotonic() + 120
        while "is served at" not in log.read_text():
            assert process.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.05)
        url = log.read_text().split("is served at ")[1].split()[0]
        with httpx2.Client(base_url=url, timeout=60) as http:
            yield process, http
    finally:
        process.kill()
        process.wait()


def child_of(process: subprocess.Popen[bytes]) -> int:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    names = {int(c): Path(f"/proc/{c}/cmdline").read_bytes() for c in children}
    return next(pid for pid, name in names.items() if b"server.child" in name)


def ends(pid: int) -> bool:
    """Whether a process that is no child of this one ends within some seconds."""
    end = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def test_answers_and_neither_end_outlives_the_other(
    serving: tuple[subprocess.Popen[bytes], httpx2.Client],
) -> None:
    process, http = serving
    text = http.post("/completions", json=ASKED).json()["choices"][0]["text"]
    with http.stream("POST", "/completions", json=ASKED | {"stream": True}) as answer:
        lines = [line for line in answer.iter_lines() if line.startswith("data: {")]
    pieces = [json.loads(line[6:])["choices"][0]["text"] for line in lines]
    assert "".join(pieces) == text
    os.kill(child_of(process), signal.SIGKILL)
    assert process.wait(20) == 2


def test_http_ends_with_the_engine(
    serving: tuple[subprocess.Popen[bytes], httpx2.Client],
) -> None:
    process, http = serving
    child = child_of(process)
    with http.stream("POST", "/completions", json=ASKED | {"stream": True, "max_tokens": 900}):
        process.kill()
        process.wait()
        assert ends(child)
