"""Runs a program in a process of its own: limits, an empty folder, and what else the system grants.

Always: a limit of time, of memory, of files' size and of open files, an empty environment,
Python's isolated mode, no input, and a folder that is deleted. Where the kernel lets a user do so:
namespaces (no network; every process that the program began ends with it) and Landlock (no file
outside the folder is made, written or removed). ``confinement`` tells which of these this machine
grants. Files can be read, so this is for the mistakes of a model, not for an attacker.
"""

from __future__ import annotations

import functools
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

_INSIDE = Path(__file__).with_name("inside.py")
"""What the process runs: it confines itself, then it runs the program."""
_STARTS_S = 10.0
"""Seconds that an interpreter may take to begin on a busy machine; not the program's."""


@dataclass(frozen=True)
class Limits:
    """What a program may use.

    Attributes:
        seconds: of wall clock, from its first line on.
        memory: bytes of address space.
        file: bytes of a file that it writes.
        processes: at once, where there are namespaces.
    """

    seconds: float = 3.0
    memory: int = 1 << 30
    file: int = 1 << 20
    processes: int = 32


@dataclass(frozen=True)
class Outcome:
    """How a program ended.

    Attributes:
        verdict: "passed": it ran to its end; "failed": it raised; "timed out"; "died": it ended
            without a word, as by ``os._exit`` or for want of memory.
        error: what it raised, else "".
    """

    verdict: str
    error: str = ""

    @property
    def passed(self) -> bool:
        """Whether it ran to its end."""
        return self.verdict == "passed"


def run_program(program: str, limits: Limits | None = None) -> Outcome:
    """Runs a program's text to its end, or to its limits; every process of it ends."""
    outcome, _ = _run(program, limits or Limits())
    return outcome


@functools.cache
def confinement() -> tuple[str, ...]:
    """What this machine's kernel grants besides limits: "namespaces", "landlock"."""
    return _run("", Limits(seconds=_STARTS_S))[1]


def _run(program: str, limits: Limits) -> tuple[Outcome, tuple[str, ...]]:
    word = secrets.token_hex(16)
    told = {
        "program": program,
        "word": word,
        "memory": limits.memory,
        "file": limits.file,
        "processes": limits.processes,
        "cpu": int(limits.seconds) + 2,
    }
    with tempfile.TemporaryDirectory(prefix="pykernels-sandbox-") as folder:
        read, write = os.pipe()
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", str(_INSIDE), str(write)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env={},
                pass_fds=(write,),
                start_new_session=True,
            )
        finally:
            os.close(write)
        with process, open(read, "rb") as answers:
            try:
                assert process.stdin is not None
                process.stdin.write(json.dumps(told).encode())
                process.stdin.close()
                begun = json.loads(_line(answers.fileno(), _STARTS_S) or "{}")
                ended = _line(answers.fileno(), limits.seconds)
            finally:
                _kill(process)
    confined = tuple(begun.get("confined", ()))
    if ended is None:
        return Outcome("timed out"), confined
    try:
        answer = json.loads(ended or "{}")
    except ValueError:
        answer = {}
    if not isinstance(answer, dict) or answer.get("word") != word:
        return Outcome("died"), confined
    error = str(answer["error"])
    return Outcome("failed" if error else "passed", error), confined


def _line(file: int, seconds: float) -> bytes | None:
    """One line of a pipe, "" at its end; None where it takes longer."""
    import select
    import time

    line, until = b"", time.monotonic() + seconds
    while not line.endswith(b"\n"):
        if not select.select([file], [], [], max(0.0, until - time.monotonic()))[0]:
            return None
        if not (byte := os.read(file, 1)):
            break
        line += byte
    return line


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Ends the process and its group; with it ends its namespace, if it has one."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        process.kill()
