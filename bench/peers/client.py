"""Our side of the wire: starts a peer, asks it for turns, holds it still while we run.

Between turns the peer is stopped (SIGSTOP): its spinning workers take no core and no bandwidth from
the one whose turn it is.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from bench.peers.catalog import OWN_VENV, ROOT, VENVS, Peer
from pykernels.shapes import MoEShape
from pykernels.target import detect

Answer = TypeVar("Answer")

START_SECONDS, REPLY_SECONDS = 180.0, 120.0
END_SECONDS = 10.0
"""Until a process that has closed its output has ended."""


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


_AVX2_ONLY = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "KT_KERNEL_CPU_VARIANT": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "OPENBLAS_CORETYPE": "Haswell",
}
"""What keeps each engine from AVX-512: where that is hidden from us, it is from them."""


class PeerProcess:
    """A peer at work on one layer shape, in its own process.

    Args:
        peer: which.
        shape: the layer.
        threads: of the peer.
        layers: copies of the weights, used in turn.
        max_tokens: the most tokens a call will have.
        command: what to run instead of the driver (tests).

    Attributes:
        why: why it has ended, "" while it is up. Every failure ends it: a driver that hangs would
            run beside the others' turns, and its late reply would be taken for the next one.

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
        self.peer, self.threads, self.why = peer, threads, ""
        numbers = (threads, layers, max_tokens, shape.E, shape.H, shape.I, shape.topk)
        extra: dict[str, str] = {}
        if command is None:
            python, extra = python_of(peer)
            driver = [str(python), "-m", "bench.peers.driver", peer.engine, peer.mode]
            command = [*driver, *map(str, numbers)]
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "KMP_"))}
        environment |= {"OMP_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": str(threads)}
        if detect().lacks(("avx512f",)):
            environment |= _AVX2_ONLY
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
        try:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment | extra,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                start_new_session=True,  # Ctrl-C is ours to handle
            )
        except OSError as error:  # its environment may be of a Python that is gone
            self._log.close()
            what = f"{command[0]} cannot be started: {error.strerror}"
            raise PeerMissing(f"{what}; make it again: python -m bench.peers.install") from None
        self._pending = b""
        try:
            self.versions = read_versions(self._reply(START_SECONDS))
        except BaseException:
            self.close()
            raise
        self._pause()

    def prepare(self, tokens: int, ids: list[list[int]]) -> None:
        """Gives the routings of the turns to come. Raises PeerMissing if it fails on them."""
        if not self._ask({"op": "prepare", "tokens": tokens, "ids": ids}, read_finite):
            raise PeerMissing("its result has infinities or NaNs")

    def turn(self, seconds: float, most: int = 1000) -> list[tuple[int, float]]:
        """About ``seconds`` of calls, at least one: (routing, seconds) of each."""
        return self._ask({"op": "turn", "seconds": seconds, "most": most}, read_calls)

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream:
                with contextlib.suppress(BrokenPipeError):  # what it was asked last, unread
                    stream.close()

    def _pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def _ask(self, request: dict[str, Any], read: Callable[[dict[str, Any]], Answer]) -> Answer:
        """What ``read`` makes of the reply."""
        if self.why:
            raise PeerMissing(self.why)
        try:
            self._send(request)
            answer = read(self._reply(REPLY_SECONDS))
        except PeerMissing as error:
            self.why = str(error)
            self.close()
            raise
        self._pause()
        return answer

    def _send(self, request: dict[str, Any]) -> None:
        assert self._process.stdin
        self._process.send_signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise PeerMissing(self._last_words()) from None

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
        return parse(line.decode(errors="replace"))

    def _last_words(self) -> str:
        try:
            code = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return "it closed its output and runs on"
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().splitlines() if line.strip()]
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"it ended with {how}{': ' + lines[-1][:120] if lines else ''}"


def parse(line: str) -> dict[str, Any]:
    """One line of a driver. Raises PeerMissing for an error or for what is not of the protocol."""
    try:
        message = json.loads(line)
    except ValueError:
        raise _foreign(line) from None
    if not isinstance(message, dict):
        raise _foreign(line)
    if "error" in message:
        raise PeerMissing(str(message["error"]))
    return message


def read_versions(message: dict[str, Any]) -> dict[str, str]:
    """The first line of a driver."""
    if not isinstance(versions := message.get("versions"), dict):
        raise _foreign(message)
    return {str(name): str(version) for name, version in versions.items()}


def read_finite(message: dict[str, Any]) -> bool:
    """The reply to "prepare"."""
    if not isinstance(finite := message.get("finite"), bool):
        raise _foreign(message)
    return finite


def read_calls(message: dict[str, Any]) -> list[tuple[int, float]]:
    """The reply to "turn": at least one call, each of which took its time."""
    try:
        calls = [(int(routing), float(took)) for routing, took in message["calls"]]
    except (KeyError, TypeError, ValueError):
        raise _foreign(message) from None
    if not calls or not all(took > 0 for _, took in calls):
        raise _foreign(message)
    return calls


def _foreign(said: object) -> PeerMissing:
    return PeerMissing(f"it does not speak the protocol: {str(said)[:80]!r}")
