"""Where the CPU's half of a program meets the half on another device: flags, and shared memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..node import Node
from ..program import Program

_WORDS = 8
"""int64 words from one flag to the next: a cache line."""


class Link:
    """A flag for each channel of a partitioned program, and the buffers that go over channels.

    The end that submits sets a channel's flag when what it sends is in memory; the other end waits
    for that. ``clear`` comes before either end begins a step.

    Args:
        halves: the programs of both devices.
        buffers: by name, tensors that both reach, of what any channel carries.
        pinned: whether a GPU reads and writes the flags.
    """

    def __init__(
        self, halves: Mapping[str, Program], buffers: Mapping[str, torch.Tensor], pinned: bool
    ) -> None:
        self.buffers = buffers
        nodes = [node for half in halves.values() for node in half.nodes if node.op == "submit"]
        self._rows = {node.attr("channel"): row for row, node in enumerate(nodes)}
        self._flags = torch.zeros(
            max(1, len(nodes)), _WORDS, dtype=torch.int64, device="cpu", pin_memory=pinned
        )
        self._array = self._flags.numpy()[:, 0]

    def address(self, node: Node) -> int:
        """Of the flag of a submit or a wait: an int64, not 0 once what is sent is there."""
        return int(self._flags[self._rows[node.attr("channel")]].data_ptr())

    def clear(self) -> None:
        """Clears all flags."""
        self._array[:] = 0

    def release(self) -> None:
        """Sets all flags, so that nobody waits any more."""
        self._array[:] = 1

    def set(self, node: Node) -> None:
        """Sets the flag of a submit."""
        self._array[self._rows[node.attr("channel")]] = 1

    def is_set(self, node: Node) -> bool:
        """Whether what a wait waits for is there."""
        return bool(self._array[self._rows[node.attr("channel")]])


def carried(program: Program) -> tuple[str, ...]:
    """Names of the buffers that go over channels at either end of one device's half."""
    names = (
        name
        for node in program.nodes
        if node.op in ("submit", "wait")
        for name in (*node.reads, *node.writes)
    )
    return tuple(dict.fromkeys(names))

