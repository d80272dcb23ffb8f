"""A server as a process of its own."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from threading import Thread

import psutil

from pykernels.errors import PykernelsError


class ServerProcess:
    """`pykernels serve`, until the ``with`` block ends.

    Args:
        options: of the command.
        port: 0: any free one.

    Attributes:
        url: where it is; ``seconds``: from its start until it took requests.

    Raises:
        PykernelsError: it has ended instead; with its last words.
    """

    def __init__(self, options: Sequence[str], port: int = 0) -> None:
        begun = time.perf_counter()
        command = [sys.executable, "-m", "model.cli.main", "serve", "--port", str(port), *options]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self._said: deque[str] = deque(maxlen=5)
        self.url = self._address()
        self.seconds = time.perf_counter() - begun
        Thread(target=self._listen, daemon=True).start()

    def _address(self) -> str:
        for line in self.process.stderr or ():
            self._said.append(line.strip())
            if " is served at " in line:
                return line.rpartition(" ")[2].strip().removesuffix("/v1")
        self.process.wait()
        raise PykernelsError("The server did not start", " ".join(self._said))

    def _listen(self) -> None:
        for line in self.process.stderr or ():
            self._said.append(line.strip())

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    @property
    def memory(self) -> float:
        """MiB that it has in main memory; 0: it has ended."""
        try:
            return float(psutil.Process(self.process.pid).memory_info().rss) / 2**20
        except psutil.NoSuchProcess:
            return 0.0

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()
