"""Messages between two processes of this server: pickled, over a pair of sockets."""

from __future__ import annotations

import pickle
import socket
import threading
from multiprocessing.connection import Connection
from typing import Any


class Channel:
    """One end. Any thread may send; one receives.

    Args:
        fd: of a connected socket, which this owns from now on.
    """

    def __init__(self, fd: int) -> None:
        self._connection = Connection(fd)
        self._sending = threading.Lock()

    def send(self, message: object) -> bool:
        """Waits until the other side takes it; False if there is none any more."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        try:
            with self._sending:
                self._connection.send_bytes(data)
        except OSError:
            return False
        return True

    def receive(self) -> Any:
        """The next message; None if the other side has ended."""
        try:
            data = self._connection.recv_bytes()
        except (EOFError, OSError):
            return None
        return pickle.loads(data)

    def fileno(self) -> int:
        """Readable when a message comes, or the other side has ended."""
        return self._connection.fileno()

    def close(self) -> None:
        self._connection.close()


def pair() -> tuple[Channel, socket.socket]:
    """A channel, and the other end, whose number a child process inherits."""
    ours, theirs = socket.socketpair()
    theirs.set_inheritable(True)
    return Channel(ours.detach()), theirs
