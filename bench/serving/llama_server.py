"""llama.cpp's server as a process of its own, on a GGUF file that both engines read."""

from __future__ import annotations

import socket
import subprocess
import tempfile
import time
from pathlib import Path

import httpx2

from bench.peers.llama_tools import SERVER, ToolMissing, find
from pykernels.errors import PykernelsError

_START_SECONDS = 600.0
_LAST_WORDS = 400


class LlamaServer:
    """`llama-server`, until the ``with`` block ends.

    Args:
        model: a GGUF file with a vocabulary.
        threads: of prompts and of tokens.
        seats: requests at once; ``places``: tokens that each may have.

    Raises:
        PykernelsError: it is not built, or has ended instead.
    """

    def __init__(self, model: Path, threads: int, seats: int, places: int) -> None:
        try:
            program = find("llama-server", SERVER)
        except ToolMissing as error:
            raise PykernelsError(str(error).partition(":")[0], f"Run {_command()}") from None
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._said = tempfile.TemporaryFile()
        options = {
            "-m": model,
            "-c": seats * places,
            "-np": seats,
            "-t": threads,
            "-tb": threads,
            "--host": "127.0.0.1",
            "--port": port,
        }
        command = [str(word) for pair in options.items() for word in pair]
        self.process = subprocess.Popen(
            [str(program), *command], stdout=self._said, stderr=self._said
        )
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    def _wait(self) -> None:
        end = time.monotonic() + _START_SECONDS
        while time.monotonic() < end:
            if self.process.poll() is not None:
                self._said.seek(0)
                words = self._said.read()[-_LAST_WORDS:].decode(errors="replace")
                raise PykernelsError("llama-server did not start", " ".join(words.split()))
            try:
                if httpx2.get(f"{self.url}/health", trust_env=False).status_code == 200:
                    return
            except httpx2.HTTPError:
                pass
            time.sleep(0.1)
        raise PykernelsError("llama-server did not start in time", "Give a smaller model")

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._said.close()

    def __enter__(self) -> LlamaServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _command() -> str:
    return f"python -m bench.peers.install {SERVER.engine}"


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
