"""The command line as a process of its own: start-up, pipes, Ctrl-C, the same text twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from model.cli.common import prepare_threads

from ...forks import ROOT, Forks
from ..conftest import Run

COMMAND = [sys.executable, "-m", "model.cli.main"]
PROMPT = "def quicksort(xs):"
MAIN = "import runpy; runpy.run_module('model.cli.main', run_name='__main__')"


def process(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *args], cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_help_imports_nothing_heavy_and_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "0")  # a terminal without a size
    heavy = "{'torch', 'transformers', 'numba', 'numpy'} & set(sys.modules)"
    code = f"import sys, model, model.cli.main\nassert not ({heavy}), {heavy}"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    seconds = []
    for _ in range(3):  # of a processor, the best of three: the machine may be busy otherwise
        before = os.times()
        result = process("--help")
        after = os.times()
        seconds.append(sum(after[2:4]) - sum(before[2:4]))  # the child's
        assert result.returncode == 0
        for command in ("generate", "chat", "doctor", "bench"):
            assert command in result.stdout
    assert min(seconds) < 0.5


@pytest.mark.parametrize("users", [{}, {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "ACTIVE"}])
def test_openmp_does_not_spin_by_default(
    monkeypatch: pytest.MonkeyPatch, users: dict[str, str]
) -> None:
    """Against the workers; what the user has set stays."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "environ", {**users})
        prepare_threads(1)
        assert os.environ["OMP_NUM_THREADS"] == users.get("OMP_NUM_THREADS", "1")
        assert os.environ["OMP_WAIT_POLICY"] == users.get("OMP_WAIT_POLICY", "PASSIVE")


def command(writer: Path, new_tokens: int) -> tuple[str, ...]:
    return ("generate", "--model", str(writer), "--max-new-tokens", str(new_tokens), PROMPT)


def test_text_is_the_same_in_any_process(forks: Forks, run: Run, writer: Path) -> None:
    """And alone on stdout."""
    first, second = forks.run(MAIN, *command(writer, 24)), run(*command(writer, 24))
    assert first.returncode == second.code == 0
    assert first.stdout == second.out
    assert first.stdout.startswith(PROMPT) and len(first.stdout) > len(PROMPT) + 10
    assert first.stderr.count("\n") == 1 and "read roof" in first.stderr


def test_ctrl_c_ends_it_cleanly(forks: Forks, writer: Path) -> None:
    started = forks.start(MAIN, *command(writer, 400))
    read = started.stdout.read(len(PROMPT) + 10)  # the model writes now
    os.kill(started.pid, signal.SIGINT)
    ended = started.end(timeout=30)
    assert read.startswith(PROMPT)
    assert (ended.returncode, ended.stderr.strip()) == (130, "")


def test_a_reader_that_goes_away_leaves_no_traceback(forks: Forks, writer: Path) -> None:
    started = forks.start(MAIN, *command(writer, 200))
    started.stdout.read(len(PROMPT) + 10)
    started.stdout.close()  # as `| head -c 28` does
    ended = started.end()
    assert ended.returncode != 0
    assert "Traceback" not in ended.stderr and "Exception" not in ended.stderr, ended.stderr
