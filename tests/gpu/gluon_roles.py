"""Warps with roles, for the shim: a thread each, of which one runs until it waits at a barrier."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .gluon_shim import Box, Threads


class Roles:
    """``gl.warp_specialize``. Where all wait for each other, all raise."""

    def __init__(self, threads: Threads) -> None:
        self.threads, self.turn = threads, threading.Condition()
        threads.roles = self

    def run(self, parts: list[tuple[Callable[..., None], tuple[Any, ...]]], *sizes: Any) -> None:
        self.waiting: dict[str, Callable[[], bool]] = {}  # by role, for what
        self.left = [f"{i} {function.__name__}" for i, (function, _) in enumerate(parts)]
        self.failed: BaseException | None = None
        self.threads.role = self.left[0]
        running = [
            threading.Thread(target=self._one, args=(role, *part))
            for role, part in zip(self.left, parts, strict=True)
        ]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        self.threads.role = ""
        if self.failed:
            raise self.failed

    def _one(self, role: str, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        with self.turn:
            try:
                self._resume(role)
                function(*arguments)
            except BaseException as error:
                self.failed = self.failed or error
            self.left = [name for name in self.left if name != role]
            self._next()

    def until(self, condition: Callable[[], bool]) -> None:
        """Lets the others run until this holds."""
        role = self.threads.role
        if not role:  # warps without roles: nobody else could
            assert condition(), "it waits for ever"
            return
        self.waiting[role] = condition
        self._next()
        self._resume(role)

    def _resume(self, role: str) -> None:
        self.turn.wait_for(lambda: self.failed or self.threads.role == role)
        if self.failed:
            raise RuntimeError("another role failed")

    def _next(self) -> None:
        """Gives the turn to a role that can run, the last one first, so that copies run ahead."""
        for role in reversed(self.left):
            if self.waiting.get(role, lambda: True)():
                self.waiting.pop(role, None)
                self.threads.role = role
                break
        else:
            if self.left:
                self.failed = self.failed or RuntimeError(f"{self.left} wait for each other")
        self.turn.notify_all()


class MBarriers:
    """``mbarrier``: a box of this kind has a phase, arrivals to come and bytes to come."""

    def __init__(self, threads: Threads, without: str | None = None) -> None:
        self.threads = threads
        if without in ("wait", "arrive"):
            setattr(self, without, lambda *args, **kwargs: None)

    @staticmethod
    def MBarrierLayout(*sizes: int) -> None:
        return None

    def init(self, box: Box, count: int) -> None:
        box.phase, box.count, box.to_come, box.bytes = 0, count, count, 0
        box.landing, box.landed = [], []

    def arrive(self, box: Box, count: int = 1, pred: Any = True) -> None:
        from .gluon_shim import whole

        self.threads.barrier()  # the compiler puts one before
        if not whole(pred):
            return
        box.to_come -= count
        assert box.to_come >= 0, "more arrive than were expected"
        complete(box)

    def expect(self, box: Box, size: int) -> None:
        box.bytes += int(getattr(size, "value", size))
        self.arrive(box)

    def wait(self, box: Box, phase: Any) -> None:
        from .gluon_shim import whole

        parity = whole(phase)
        self.threads.roles.until(lambda: box.phase & 1 != parity)
        for landed in box.landed:
            landed.owes.discard("wait")


def complete(box: Box) -> None:
    if box.to_come == 0 and box.bytes == 0:
        box.phase, box.to_come = box.phase + 1, box.count
        box.landing, box.landed = [], box.landing


def load(descriptor: Any, at: list[Any], box: Box, to: Box) -> None:
    """``tma.async_load``: it lands at once, but who has not waited may not read it."""
    to.arrives(descriptor.load(at))
    box.landing.append(to.source)
    box.bytes -= to.data.nbytes
    complete(box)
