"""Where the parts of a program on GPUs meet, besides their flags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from pykernels.gpu.collectives.one_shot import OneShotMemory

from ....program import Program
from ....program.node import Node
from ....runner.batch import DeviceLost
from ...link import Link

Members = tuple[str, ...]
"""Devices that make sums together, in the order of the sum."""


@dataclass(frozen=True)
class OneShots:
    """What GPUs need for the sums that they make without channels (``one_shot_all_reduce``).

    Attributes:
        memory: of each group, by rank.
        stop: int32 [1], pinned; see ``pykernels.gpu.collectives.one_shot``.
    """

    memory: Mapping[Members, Sequence[OneShotMemory]]
    stop: torch.Tensor

    def reset(self) -> None:
        """To the beginning, when no step runs: one that was given up has left some sums half
        made."""
        for memory in self.memory.values():
            for each in memory:
                each.reset()
                if each.counts.is_cuda:
                    torch.cuda.synchronize(each.counts.device)
        self.stop.zero_()


class GpuLink(Link):
    """A ``Link`` whose GPUs also meet each other without the CPU.

    Args:
        between: by number, what the channels between two GPUs carry, by name.
        one_shots: of sums without channels.
    """

    def __init__(
        self,
        parts: Mapping[str, Program],
        buffers: Mapping[str, torch.Tensor],
        pinned: bool,
        between: Mapping[int, Mapping[str, torch.Tensor]],
        one_shots: OneShots,
    ) -> None:
        super().__init__(parts, buffers, pinned)
        self._between, self.one_shots = between, one_shots
        self._given_up = False

    def is_between_gpus(self, node: Node) -> bool:
        """Whether a submit or a wait is the end of a channel between two GPUs."""
        return node.attr("channel") in self._between

    def memory(self, node: Node) -> Mapping[str, torch.Tensor]:
        """By name, the tensors in which the channel of a submit or a wait carries its buffers."""
        return self._between.get(node.attr("channel"), self.buffers)

    def clear(self) -> None:
        super().clear()
        if self.clears and self.one_shots.stop[0]:
            self.one_shots.reset()

    def release(self) -> None:
        super().release()
        self.one_shots.stop[0] = 1

    def give_up(self) -> None:
        """Releases GPUs of which none goes on; ``check`` says so."""
        self._given_up = True
        self.release()

    def check(self) -> None:
        """Raises DeviceLost if a GPU has waited for another one in vain, in a step that has
        ended."""
        if self._given_up:
            raise DeviceLost(
                "GPUs have waited for each other in vain", "Load the model again, on one GPU"
            )
        if self.clears and self.one_shots.stop[0]:
            raise DeviceLost(
                "a GPU has waited in vain for another one's part of a sum", "Load the model again"
            )
