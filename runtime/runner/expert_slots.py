"""The expert slots of a runner's programs: their tables, and what the routers chose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ..experts.cache import CachePolicy, CacheStats, ExpertCache, Filler
from ..experts.cache.cache import Chosen
from ..passes.keep_routing import routers
from ..program import Program
from ..program.node import STEP_SIZES
from ..program.weight_spec import WeightSpec

COUNTED = 1024
"""Tokens of a step whose choices are counted, at most: its last ones. Of a long prompt they say
what comes next, and more would take longer than they are worth."""
BURST = 256 << 20
"""Bytes of experts that are on their way at once after a prompt: some milliseconds of a link."""

Kept = tuple[tuple[int, int, NDArray[np.integer]], ...]
"""(row of the layer, which of the step's sizes, ids [bucket, topk]) of each router."""


class ExpertSlots:
    """The slots of a runner's layers.

    Args:
        program: any of the runner's, parted by ``expert_cache``.
        pinned: whether a device reads the table by itself.

    Attributes:
        specs: of the experts in slots, a layer each, in order.
        table: int32 [L, E] on the CPU, as the next step is to read it.
        tables: its rows, by the buffers of a program.
    """

    def __init__(
        self, program: Program, policy: CachePolicy, filler: Filler, pinned: bool = False
    ) -> None:
        named = {n.inputs["slots"]: n for n in program.nodes if n.op == "place_routing"}
        places = [*named.values()]  # of a layer that defers experts one of two, by the same table
        self._rows = {node.layer: i for i, node in enumerate(places)}
        self.specs = expert_slot_specs(program)
        E = max(program.shape(node.inputs["slots"])[0] for node in places)
        empty = torch.full((len(places), E), -1, dtype=torch.int32, device="cpu")
        self.table = empty.pin_memory() if pinned else empty
        self.tables = dict(zip(named, self.table, strict=True))
        expert = max(spec.bytes_per_expert for spec in self.specs)
        self.cache = ExpertCache(
            [spec.shape[0] for spec in self.specs],
            E,
            policy,
            filler,
            max(1, BURST // expert),
            self.table.numpy(),
        )
        self._kept: dict[int, Kept] = {}
        self._ended: list[tuple[list[Chosen], int, bool, NDArray[np.int32]]] = []

    @property
    def stats(self) -> CacheStats:
        """Counts since the beginning."""
        return self.cache.stats

    def add(
        self, step: object, program: Program, outputs: Mapping[str, NDArray[np.generic]]
    ) -> None:
        """Takes note of a bound program and its outputs, among which are the routers' choices."""
        kept: list[tuple[int, int, NDArray[np.integer]]] = []
        for node in routers(program):
            name = node.outputs["ids"]
            if name in outputs and node.layer in self._rows:
                ids: NDArray[np.integer] = outputs[name]  # type: ignore[assignment]
                size = STEP_SIZES.index(str(program.buffers[name].shape[0]))
                kept.append((self._rows[node.layer], size, ids))
        self._kept[id(step)] = tuple(kept)

    def before_step(self) -> bool:
        """Brings the table up to date; no step runs. Whether it has changed."""
        return self.cache.before_step()

    def plan(self) -> None:
        """Counts what the last steps chose, and decides what comes into the slots next; while a
        step is running, which nothing of it delays."""
        for ended in self._ended:
            self.cache.count(*ended)
        self._ended.clear()
        self.cache.plan()

    def ended(self, step: object, sizes: Sequence[int], decode: bool) -> None:
        """Takes what a step chose that has ended; the next one writes over it.

        Args:
            sizes: the sizes of the step (``STEP_SIZES``).
        """
        chosen = [
            Chosen(row, ids[max(0, sizes[size] - COUNTED) : sizes[size]].copy())
            for row, size, ids in self._kept[id(step)]
        ]
        counted = chosen, min(sizes[0], COUNTED), decode, self.cache.table.copy()
        self._ended.append(counted)

    def close(self) -> None:
        """Ends what is on its way."""
        self.cache.close()


def expert_slot_specs(program: Program) -> list[WeightSpec]:
    """Specs of the experts in slots, one for each layer that has slots, in order."""
    names = [node.weights["experts"] for node in program.nodes if node.role == "cached"]
    return [program.weights[name] for name in dict.fromkeys(names)]
