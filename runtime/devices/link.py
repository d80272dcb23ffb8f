"""Where the parts of a program on several devices meet: flags, and shared memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch

from pykernels.errors import PykernelsError

from ..program import Program
from ..program.node import Node

_WORDS = 8
"""int64 words from one flag to the next: a cache line."""
_POLL_S, _LIMIT_S = 2e-5, 60.0


class Link:
    """A flag for each channel of a partitioned program, and the buffers that go over channels.

    The end that submits sets a channel's flag when what it sends is in memory; the other end waits
    for that. ``clear`` comes before either end begins a step.

    Args:
        parts: the programs of the devices.
        buffers: by name, tensors that both ends of a channel reach, of what any channel carries.
        pinned: whether a GPU reads and writes the flags.

    Attributes:
        clears: whether ``clear`` does so; ``in_order``: False: the host launches nothing behind a
            wait before what it waits for is there.
        delay: test hook that delays a flag. A thread that plays the other device's stream calls it
            before it sets a flag or waits for one.
    """

    def __init__(
        self, parts: Mapping[str, Program], buffers: Mapping[str, torch.Tensor], pinned: bool
    ) -> None:
        self.buffers = buffers
        self.clears = self.in_order = True
        self.delay: Callable[[], None] = lambda: None
        nodes = [node for part in parts.values() for node in part.nodes if node.op == "submit"]
        self._rows = {node.attr("channel"): row for row, node in enumerate(nodes)}
        self._flags = torch.zeros(
            max(1, len(nodes)), _WORDS, dtype=torch.int64, device="cpu", pin_memory=pinned
        )
        self._array = self._flags.numpy()[:, 0]
        self._needed = np.ones(len(self._array), np.int64)

    def address(self, node: Node) -> int:
        """The address of the int64 flag of a submit or a wait."""
        return int(self._flags[self._row(node)].data_ptr())

    def set_signals(self, node: Node, signals: int) -> None:
        """Sets the number of jobs that increment the flag of a submit (default 1)."""
        self._needed[self._row(node)] = signals

    def needed(self, node: Node) -> int:
        """The flag's number when what is sent is there."""
        return int(self._needed[self._row(node)])

    def clear(self) -> None:
        """Clears all flags, unless they are released."""
        if self.clears:
            self._array[:] = 0

    def release(self) -> None:
        """Sets all flags, so that nobody waits any more."""
        self._array[:] = self._needed

    @property
    def passed(self) -> int:
        """How many channels have their flag."""
        return int(np.count_nonzero(self._array))

    @contextmanager
    def released(self) -> Iterator[None]:
        """Within it nobody waits; what is received is not what was sent."""
        self.clears = False
        self.release()
        try:
            yield
        finally:
            self.clears = True

    def set(self, node: Node) -> None:
        """Sets the flag of a submit."""
        self.delay()
        self._array[self._row(node)] = self.needed(node)

    def wait(self, node: Node) -> None:
        """Returns when what a wait waits for is there.

        Raises:
            PykernelsError: it does not come.
        """
        self.delay()
        row, end = self._row(node), time.monotonic() + _LIMIT_S
        while self._array[row] < self._needed[row]:
            if time.monotonic() > end:
                raise PykernelsError(f"{node.name} waits for the other device in vain", "Try again")
            time.sleep(_POLL_S)

    def _row(self, node: Node) -> int:
        return self._rows[node.attr("channel")]


def carried(program: Program) -> tuple[str, ...]:
    """Names of the buffers that go over channels at either end of one device's half."""
    names = (
        name
        for node in program.nodes
        if node.op in ("submit", "wait")
        for name in (*node.reads, *node.writes)
    )
    return tuple(dict.fromkeys(names))
