"""The engine's thread: it runs steps while there is work, and holds no engine while there is none.

So an engine that nobody has any more, nor a handle or a stream of it, ends without ``close``: the
thread is woken, cancels what runs, and lets go of the model.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

from ..runner.batch import DeviceLost
from .core import Core


class Loop:
    """What an engine and its thread share: everything but the core, which has the model.

    Attributes:
        inbox: what is asked for; the owner of the core calls it between two steps.
        gate: nothing enters the inbox behind the end. Reentrant: the garbage collector may end a
            stream, which cancels, while its thread is in here.
        closed: whether the end has come; ``error``: what brought it, if a device was lost.
        thread: None until ``start``.
    """

    def __init__(self) -> None:
        self.inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.gate = threading.RLock()
        self.closed = False
        self.error: DeviceLost | None = None
        self.thread: threading.Thread | None = None
        self._stopping, self._pid = False, os.getpid()

    def has_news(self) -> bool:
        """Whether something waits to be done before the next step."""
        return not self.inbox.empty()

    def start(self, core: Core) -> None:
        """Starts the thread, which ends with ``end`` or the process."""
        self.thread = threading.Thread(
            target=self._run, args=(weakref.ref(core),), name="engine", daemon=True
        )
        atexit.register(self.end)
        self.thread.start()

    def stop(self) -> None:
        """Has the thread end after the step under way. Waits for nothing: the garbage collector
        may call it, in any thread."""
        self.inbox.put(self._stop)

    def end(self) -> None:
        """Stops the thread and waits for its end; in a forked child there is none."""
        thread = self.thread
        if thread is None or os.getpid() != self._pid:
            return
        self.stop()
        if thread is not threading.current_thread():
            thread.join()

    def obey(self) -> None:
        """Does what was asked for; the caller owns the core."""
        while not self.inbox.empty():
            self.inbox.get()()

    def finish(self, core: Core, error: BaseException | None) -> None:
        """Ends every request, those in the inbox too: no consumer waits for ever."""
        with self.gate:
            self.closed = True
        self.obey()
        core.end_all(error)
        core.close(lost=error is not None)

    def _run(self, core: weakref.ref[Core]) -> None:
        try:
            while not self._stopping:
                # Here it waits, and no name in this frame has the core.
                self._work(self.inbox.get(), core)
        finally:
            atexit.unregister(self.end)

    def _work(self, asked: Callable[[], None], owned: weakref.ref[Core]) -> None:
        """Does what was asked for, then steps until there is no work, or the end has come."""
        core = owned()
        error: BaseException | None = None
        if core is None:  # nobody has the engine, and there is nothing to end
            self._stopping = True
            return
        try:
            asked()
            while not self._stopping:
                self.obey()
                core.step()
                if not core.busy:
                    return
        except DeviceLost as failure:  # every consumer gets it
            error = self.error = failure
        except BaseException as failure:
            error = failure
            raise
        finally:
            if error is not None:
                self._stopping = True
            if self._stopping:
                self.finish(core, error)

    def _stop(self) -> None:
        self._stopping = True
