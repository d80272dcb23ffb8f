"""The command line as a process of its own: start-up, pipes, Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from model.cli.shared.common import prepare_threads

from ..conftest import Run

ROOT = Path(__file__).resolve().parents[3]
COMMAND = [sys.executable, "-m", "model.cli.main"]
PROMPT = "def quicksort(xs):"
PATIENCE = 600  # seconds, on however busy a machine


def test_help_imports_nothing_heavy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "0")  # a terminal without a size
    code = """
import sys
from model.cli.main import main
sys.argv = ["pykernels", "--help"]
try:
    main()
finally:
    print({"torch", "transformers", "numba", "numpy"} & {*sys.modules}, file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "set()\n")
    for command in ("generate", "chat", "doctor", "bench"):
        assert command in done.stdout


def test_ctrl_c_while_the_commands_are_imported() -> None:
    code = """
import os, signal, sys
from model.cli.main import main
class Interrupts:
    def find_spec(self, name, *_):
        if name == "model.cli.app":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupts())
main()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


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


def test_ctrl_c_ends_it_cleanly(writer: Path, run: Run) -> None:
    """Behind the beginning of the text that another process writes."""
    text = run("generate", "--model", writer, "--max-new-tokens", 24, PROMPT).out
    with start(writer, 400) as process:
        again = begun(process)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE)
    assert text.startswith(again) and len(again) > len(PROMPT)
    assert (process.returncode, errors.strip()) == (130, "")


def test_a_reader_that_goes_away_leaves_no_traceback(writer: Path) -> None:
    with start(writer, 200) as process:
        begun(process)
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()  # as `| head -c 28` does
        errors = process.stderr.read()
        assert process.wait(timeout=PATIENCE) != 0
    assert "Traceback" not in errors and "Exception" not in errors, errors
