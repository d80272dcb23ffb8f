"""A packed cache copied to the NUMA nodes that read it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from pykernels.quant import PackedExperts
from pykernels.quant.split import Experts, SplitExperts
from runtime.experts.sharding import make_room
from runtime.machine.nodes import MemoryNodes
from runtime.matrix import PackedHeads, PackedMatrix, pack_nothing

from ..checkpoint.packed.mapped import PackedFolder
from ..modules.moe import FusedMoE
from .packed import FromCache
from .packing import Packing


class CopiedCache(Packing):
    """Objects of a mapped cache, copied into slices, one a node: bytes move, nothing is packed.

    A file's pages lie on the node whose thread read them first, and processes share them, so they
    cannot be bound to the node that works with them.

    Args:
        report: called with the bytes of what was copied.
    """

    def __init__(
        self,
        folder: PackedFolder,
        model: nn.Module,
        nodes: MemoryNodes,
        report: Callable[[int], None],
    ) -> None:
        self._mapped, self._nodes, self._report = FromCache(folder, model), nodes, report

    def tensor(self, name: str) -> torch.Tensor | None:
        return self._mapped.tensor(name)

    def table(self, name: str) -> torch.Tensor | PackedMatrix:
        table = self._mapped.table(name)
        if isinstance(table, PackedMatrix):
            return self._matrix(table)
        copy = self._nodes.allocate(table.nbytes).view(table.dtype).view(table.shape)
        return self._copied(copy, table)

    def runs(self, *names: str) -> list[PackedMatrix]:
        return [self._matrix(matrix) for matrix in self._mapped.runs(*names)]

    def stack(self, name: str, shape: tuple[int, int, int]) -> PackedHeads | None:
        heads = self._mapped.stack(name, shape)
        return None if heads is None else self._heads(heads)

    def heads(self, name: str, rows: Sequence[slice], transposed: bool = False) -> PackedHeads:
        return self._heads(self._mapped.heads(name, rows, transposed))

    def mlp(self, gate: str, up: str, down: str) -> Experts:
        return self._experts(self._mapped.mlp(gate, up, down))

    def experts(self, module: FusedMoE) -> Experts:
        return self._experts(self._mapped.experts(module))

    def _matrix(self, matrix: PackedMatrix) -> PackedMatrix:
        for part in ("blocks", "scales"):
            mapped = getattr(matrix, part)
            copy = self._nodes.allocate_units(*mapped.shape)
            setattr(matrix, part, self._copied(copy, mapped))
        return matrix

    def _heads(self, heads: PackedHeads) -> PackedHeads:
        for part in ("blocks", "scales"):
            mapped = getattr(heads, part)
            copy = self._nodes.allocate_units(heads.G, mapped.nbytes // heads.G)
            copy = copy.view(mapped.shape)
            setattr(heads, part, self._copied(copy, mapped))
        return heads

    def _experts(self, mapped: PackedExperts) -> Experts:
        room = make_room(mapped.shape, mapped.fmt, mapped.down_fmt, self._nodes, pack_nothing)
        if isinstance(room, SplitExperts):
            room.take(mapped)
            self._report(mapped.nbytes)
        else:
            self._copied(room.arena, mapped.arena)
            room.packed = mapped.packed
        return room

    def _copied(self, copy: torch.Tensor, mapped: torch.Tensor) -> torch.Tensor:
        copy.copy_(mapped)
        self._report(mapped.nbytes)
        return copy
