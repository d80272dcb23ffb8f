"""A lock of the whole process that survives a fork and a signal handler."""

from __future__ import annotations

import os
import threading


class ForkSafeLock:
    """``with something.lock:`` is for one thread at a time.

    Re-entrant, since a signal handler may take it while its own thread holds it. A forked child
    gets a new one: the thread that held it does not exist there.
    """

    def __init__(self) -> None:
        self._renew()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self.lock = threading.RLock()
