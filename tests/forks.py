"""Processes that share their beginning: one has done the imports, its forks run a script each.

To import torch and transformers takes six seconds of a processor, most of what a short process
needs. A fork ends as any script does, through the end of its interpreter. It has its parent's
modules and no thread.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[1]

_PARENT = """
import gc, json, os, socket, sys
{first}
gc.collect()
gc.freeze()  # else each fork copies, at its end, the pages of all that was imported
tasks = os.listdir("/proc/self/task")
names = [open(f"/proc/self/task/{{task}}/comm").read().strip() for task in tasks]
assert len(names) == 1, f"a fork has none of the other threads: {{names}}"
asked = socket.socket(fileno=int(sys.argv[1]))
while True:
    script, streams, *_ = socket.recv_fds(asked, 1 << 16, 2)
    if not script:
        sys.exit()
    child = os.fork()
    if child == 0:
        break
    for stream in streams:
        os.close(stream)
    asked.sendall(b"%d\\n" % child)
    asked.sendall(b"%d\\n" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
asked.close()
for number, stream in enumerate(streams, 1):
    os.dup2(stream, number)
    os.close(stream)
sys.argv, script = json.loads(script)
exec(script)
"""


@dataclass
class Fork:
    """A running script. ``stdout`` and ``stderr`` may be read while it runs."""

    pid: int
    stdout: IO[str]
    stderr: IO[str]
    _parent: IO[bytes]

    def end(self, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Waits for it, and kills it after ``timeout`` seconds; what it wrote and nobody read."""
        late = threading.Timer(timeout, os.kill, (self.pid, signal.SIGKILL))
        late.start()
        try:
            out = "" if self.stdout.closed else self.stdout.read()
            errors = self.stderr.read()
            code = int(self._parent.readline())
        finally:
            late.cancel()
            self.stdout.close()
            self.stderr.close()
        return subprocess.CompletedProcess([], code, out, errors)


class Forks:
    """A process that has run the script ``first``, and forks; one of them runs at a time."""

    def __init__(self, first: str, **variables: str) -> None:
        self._ask, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PARENT.format(first=first), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
        )
        theirs.close()
        self._answers = self._ask.makefile("rb")

    def start(self, script: str, *args: str) -> Fork:
        """Runs a script, with ``sys.argv`` of its arguments."""
        out, errors = os.pipe(), os.pipe()
        message = json.dumps((["-c", *args], script)).encode()
        socket.send_fds(self._ask, [message], [out[1], errors[1]])
        for stream in (out[1], errors[1]):
            os.close(stream)
        pid = int(self._answers.readline())
        return Fork(pid, os.fdopen(out[0]), os.fdopen(errors[0]), self._answers)

    def run(self, script: str, *args: str) -> subprocess.CompletedProcess[str]:
        return self.start(script, *args).end()

    def close(self) -> None:
        self._ask.shutdown(socket.SHUT_RDWR)
        self._answers.close()
        self._ask.close()
        self._process.wait(timeout=60)
