"""Our side of the wire: starts a peer, asks it for turns, holds it still while we run.

Between turns the peer is stopped (SIGSTOP): its spinning workers take no core and no bandwidth from
whoever's turn it is.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.peers.catalog import OWN_VENV, ROOT, VENVS, Peer
from pykernels.shapes import MoEShape

START_SECONDS, REPLY_SECONDS = 180.0, 120.0


class PeerMissing(Exception):
    """This peer cannot be timed here; the message is the reason, for its row of the table."""


def python_of(peer: Peer) -> tuple[Path, dict[str, str]]:
    """The Python that runs a peer, and what its environment needs.

    Raises:
        PeerMissing: it is not installed.
    """
    if peer.engine not in OWN_VENV:
        return Path(sys.executable), {}
    home = VENVS / peer.engine
    if (home / "pins.json").exists():
        return home / "bin/python", {}
    packages = home / "packages"
    if packages.exists():
        return Path(sys.executable), {"PYTHONPATH": str(packages)}
    raise PeerMissing("not installed: python -m bench.peers.install")


class PeerProcess:
    """A peer at work on one layer shape, in its own process.

    Args:
        peer: which.
        shape: the layer.
        threads: of the peer.
        layers: copies of the weights, used in turn.
        max_tokens: the most tokens a call will have.
        command: what to run instead of the driver (tests).

    Raises:
        PeerMissing: not installed, or it could not start.
    """

    def __init__(
        self,
        peer: Peer,
        shape: MoEShape,
        threads: int,
        layers: int,
        max_tokens: int,
        command: list[str] | None = None,
    ) -> None:
        self.peer, self.threads = peer, threads
        numbers = (threads, layers, max_tokens, shape.E, shape.H, shape.I, shape.topk)
        extra: dict[str, str] = {}
        if command is None:
            python, extra = python_of(peer)
            driver = [str(python), "-m", "bench.peers.driver", peer.engine, peer.mode]
            command = [*driver, *map(str, numbers)]
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "KMP_"))}
        environment |= {"OMP_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": str(threads)}
        self._log = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment | extra,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,  # Ctrl-C is ours to handle
        )
        self._pending = b""
        try:
            self.versions: dict[str, str] = self._reply(START_SECONDS)["versions"]
        except BaseException:
            self.close()
            raise
        self._pause()

    def prepare(self, tokens: int, ids: list[list[int]]) -> None:
        """Gives the routings of the turns to come. Raises PeerMissing if it fails on them."""
        reply = self._ask({"op": "prepare", "tokens": tokens, "ids": ids})
        if not reply["finite"]:
            raise PeerMissing("its result has infinities or NaNs")

    def turn(self, seconds: float, most: int = 1000) -> list[tuple[int, float]]:
        """About ``seconds`` of calls, at least one: (routing, seconds) of each."""
        reply = self._ask({"op": "turn", "seconds": seconds, "most": most})
        return [(int(routing), float(took)) for routing, took in reply["calls"]]

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream:
                stream.close()

    def _pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin
        self._process.send_signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise PeerMissing(self._last_words()) from None
        reply = self._reply(REPLY_SECONDS)
        self._pause()
        return reply

    def _reply(self, seconds: float) -> dict[str, Any]:
        """The next JSON line; a peer that dies, fails or hangs becomes PeerMissing."""
        assert self._process.stdout
        end = time.monotonic() + seconds
        while b"\n" not in self._pending:
            left = end - time.monotonic()
            if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
                raise PeerMissing(f"no answer for {seconds:.0f} s")
            if not (data := os.read(self._process.stdout.fileno(), 1 << 16)):
                raise PeerMissing(self._last_words())
            self._pending += data
        line, self._pending = self._pending.split(b"\n", 1)
        return parse(line.decode())

    def _last_words(self) -> str:
        code = self._process.wait()
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().splitlines() if line.strip()]
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"it ended with {how}{': ' + lines[-1][:120] if lines else ''}"


def parse(line: str) -> dict[str, Any]:
    """One line of a driver. Raises PeerMissing for an error or for what is not of the protocol."""
    try:
        message = json.loads(line)
    except ValueError:
        raise PeerMissing(f"it does not speak the protocol: {line[:80]!r}") from None
    if not isinstance(message, dict):
        raise PeerMissing(f"it does not speak the protocol: {line[:80]!r}")
    if "error" in message:
        raise PeerMissing(str(message["error"]))
    return message
