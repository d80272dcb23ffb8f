"""The command line as a process of its own: start-up, pipes, Ctrl-C, the same text twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from model.cli.common import prepare_threads

ROOT = Path(__file__).resolve().parents[3]
COMMAND = [sys.executable, "-m", "model.cli.main"]
PROMPT = "def quicksort(xs):"


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


def start(model: Path, tokens: int) -> subprocess.Popen[str]:
    """Writes ``tokens`` tokens."""
    args = ("generate", "--model", str(model), "--max-new-tokens", str(tokens), PROMPT)
    return subprocess.Popen(
        [*COMMAND, *args], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def begun(process: subprocess.Popen[str]) -> str:
    """What it writes first, when the model has begun to write."""
    assert process.stdout is not None
    return process.stdout.read(len(PROMPT) + 10)


def test_text_is_the_same_twice_and_alone_on_stdout(writer: Path) -> None:
    """And Ctrl-C ends it cleanly."""
    with start(writer, 24) as process:
        text, errors = process.communicate(timeout=120)
    assert process.returncode == 0
    assert text.startswith(PROMPT) and len(text) > len(PROMPT) + 10
    assert errors.count("\n") == 1 and "read roof" in errors
    with start(writer, 400) as process:
        again = begun(process)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert text.startswith(again)
    assert (process.returncode, errors.strip()) == (130, "")


def test_a_reader_that_goes_away_leaves_no_traceback(writer: Path) -> None:
    with start(writer, 200) as process:
        begun(process)
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()  # as `| head -c 28` does
        errors = process.stderr.read()
        assert process.wait(timeout=60) != 0
    assert "Traceback" not in errors and "Exception" not in errors, errors
