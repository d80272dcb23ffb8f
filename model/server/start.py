"""Starts the process that speaks HTTP, and gives it a model."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from pykernels.errors import PykernelsError

from .backend.channel import Channel, pair

_MODULE = f"{__package__}.child"
_END_SECONDS = 5


class HttpProcess:
    """A process that imports what it needs while this one loads the model; in a ``with``.

    Args:
        path: of the model.
        bound: the socket that clients come to.
        level: of its log.
    """

    def __init__(self, path: Path, bound: socket.socket, level: int) -> None:
        self._channel, theirs = pair()
        with theirs:
            fds = theirs.fileno(), bound.fileno()
            numbers = map(str, (*fds, level))
            self._process = subprocess.Popen(
                [sys.executable, "-m", _MODULE, *numbers, str(path)],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                process_group=0,  # a terminal's Ctrl-C is for this process, which passes it on
            )
        self._signal: int | None = None

    def __enter__(self) -> HttpProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()  # which ends it
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def serve(self, host: Callable[[Channel], object], begin: object) -> None:
        """Gives it the model, and waits until SIGTERM or Ctrl-C has ended it: then what runs has
        its time to end.

        Args:
            host: begins to answer on the channel that it is given.
            begin: the message with which the other process begins.

        Raises:
            KeyboardInterrupt: Ctrl-C; SystemExit: SIGTERM.
            PykernelsError: the process has ended by itself.
        """
        before = {number: signal.signal(number, self._end) for number in _SIGNALS}
        try:
            host(self._channel)
            self._channel.send(begin)
            status = self._process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if self._signal == signal.SIGINT:
            raise KeyboardInterrupt
        if self._signal is not None:
            raise SystemExit(0)
        if status:
            how = f"signal {-status}" if status < 0 else f"status {status}"
            raise PykernelsError(
                f"the process that speaks HTTP has ended with {how}", "Start the server again"
            )

    def _end(self, number: int, frame: FrameType | None) -> None:
        """Lets it drain; a second Ctrl-C ends it at once."""
        again, self._signal = self._signal, number
        if again is not None and number == signal.SIGINT:
            self._process.kill()
        else:
            self._process.terminate()


_SIGNALS = signal.SIGINT, signal.SIGTERM
