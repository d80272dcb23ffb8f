"""The NUMA nodes that weights are dealt over (SOSP'25 section 3.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .memory import allocate, allocate_side_by_side


@dataclass(frozen=True)
class MemoryNodes:
    """Where the memory of weights is: one slice of each matrix on each node.

    Attributes:
        numbers: the kernel's number of each node; None: made up, its memory is not bound. One
            entry: nothing is sliced.
        narrow: whether experts too narrow for all nodes may be cut into fewer slices.
    """

    numbers: tuple[int | None, ...] = (None,)
    narrow: bool = True

    def __len__(self) -> int:
        return len(self.numbers)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] of zeros for what all workers read alike: its pages on all nodes in turns.

        Raises:
            PykernelsError: as ``memory.allocate``.
        """
        return allocate(nbytes, interleaved=self.numbers if len(self) > 1 else ())

    def allocate_units(self, units: int, nbytes: int) -> torch.Tensor:
        """uint8 [units, nbytes] of zeros, those of each slice on its node (``slice_cuts``).

        Raises:
            PykernelsError: as ``memory.allocate``.
        """
        cuts = slice_cuts(units, len(self))
        if len(cuts) == 2:
            return self.allocate(units * nbytes).view(units, nbytes)
        sizes = [nbytes * (last - first) for first, last in zip(cuts, cuts[1:], strict=False)]
        return allocate_side_by_side(sizes, self.numbers).view(units, nbytes)


ONE_NODE = MemoryNodes()


def slice_cuts(units: int, nodes: int) -> Sequence[int]:
    """Where the slices of a matrix begin, and the end, in units that are not cut (32-row blocks, or
    heads): as even as they go; one slice where there are fewer units than nodes."""
    parts = nodes if units >= nodes else 1
    return [units * part // parts for part in range(parts + 1)]
