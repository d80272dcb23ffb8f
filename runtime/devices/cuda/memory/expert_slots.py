"""The expert slots of a model on its GPUs: those of a layer lie on the GPU of the layer."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from ....experts.cache import CachePolicy, Filler, Move
from ....machine.pinned import Pinned
from ....program import Program
from ....program.weights import WeightStore
from ....runner.expert_slots import ExpertSlots, expert_slot_specs
from ...cpu import weights as cpu
from ...gpus import Gpus, interpreted
from .experts import ExpertSlotFiller, ExpertSlotLayer
from .weights import experts


@dataclass(frozen=True)
class SlotsOnGpus:
    """The slots of a runner's programs, and what programs read of them.

    Attributes:
        rows: by buffer, the row of a layer, on its GPU: int32 [E].
    """

    slots: ExpertSlots
    rows: Mapping[str, torch.Tensor]
    _tables: Sequence[torch.Tensor]

    @classmethod
    def of(
        cls,
        program: Program,
        store: WeightStore,
        gpus: Gpus,
        policy: CachePolicy,
        pinned: Pinned,
    ) -> SlotsOnGpus:
        """All of them empty, with a filler on each GPU.

        Args:
            program: any of the runner's. Its experts lie in ``store``.
            pinned: gets their tiles; where it cannot, a warning says that copies are slower.
        """
        by_gpu: dict[str, dict[int, ExpertSlotLayer]] = {}
        owners = _gpus_of_slots(program)
        for number, spec in enumerate(expert_slot_specs(program)):
            assert spec.full is not None
            tiles = store.get(spec.full, cpu.CPU_DEVICE, cpu.packed)
            gpu = owners[spec.name]
            there = store.get(spec, gpus[gpu], experts)
            by_gpu.setdefault(gpu, {})[number] = ExpertSlotLayer(spec, tiles, there)
        fillers = {gpu: ExpertSlotFiller(own, gpus[gpu]) for gpu, own in by_gpu.items()}
        reasons = list[str]()
        for gpu, own in by_gpu.items() if not interpreted(gpus) else ():
            with torch.cuda.device(gpus[gpu]):
                arenas = [part.arena for layer in own.values() for part in layer.tiles.slices]
                reasons += filter(None, map(pinned.add, arenas))
                fillers[gpu].warm()
        if reasons:
            warnings.warn(
                f"experts come into slots slower than they could: {reasons[0]}", stacklevel=2
            )
        by_layer = {number: fillers[gpu] for gpu, own in by_gpu.items() for number in own}
        filler = _Fillers(tuple(fillers.values()), by_layer)
        slots = ExpertSlots(program, policy, filler, not interpreted(gpus))
        tables = {gpu: slots.table.to(gpus[gpu], copy=True) for gpu in by_gpu}
        gpu_of = [gpu for _, gpu in sorted((i, gpu) for gpu in by_gpu for i in by_gpu[gpu])]
        rows = {name: tables[gpu_of[i]][i] for i, name in enumerate(slots.tables)}
        return cls(slots, rows, tuple(tables.values()))

    def update(self) -> None:
        """Copies the table to the GPUs, in front of a step that reads it."""
        for table in self._tables:
            with torch.cuda.device(table.device) if table.is_cuda else nullcontext():
                table.copy_(self.slots.table, non_blocking=True)


def _gpus_of_slots(program: Program) -> dict[str, str]:
    """By the name of experts in slots, the GPU that has them."""
    cached = (node for node in program.nodes if node.role == "cached")
    return {node.weights["experts"]: node.device for node in cached}


@dataclass(frozen=True)
class _Fillers(Filler):
    """One for each GPU; ``by_layer``: that of each layer. See ``experts.cache.Filler``."""

    every: Sequence[ExpertSlotFiller]
    by_layer: Mapping[int, ExpertSlotFiller]

    def begin(self, moves: Sequence[Move]) -> None:
        for filler in self.every:
            if own := [move for move in moves if self.by_layer[move.layer] is filler]:
                filler.begin(own)

    def finished(self) -> Sequence[Move]:
        return [move for filler in self.every for move in filler.finished()]

    def close(self) -> None:
        for filler in self.every:
            filler.close()
