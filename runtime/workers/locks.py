"""Locks of the whole process, which neither a fork nor a signal's handler leaves held for ever."""

from __future__ import annotations

import os
import threading


class ForkSafeLock:
    """``with something.lock:`` is for one thread at a time.

    A handler may come back to it while its own thread holds it. In a forked child it is a new one:
    who held it is not there to give it up.
    """

    def __init__(self) -> None:
        self._renew()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self.lock = threading.RLock()
