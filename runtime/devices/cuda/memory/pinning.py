"""Pins what crosses from main memory to GPUs."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pykernels.errors import PykernelsError
from pykernels.quant.split import Experts

from ....machine.pinned import Pinned
from ....planning.streaming import Streaming
from ....program import Program
from ....program.weights import LayoutOf, WeightStore
from ...cpu import weights as cpu
from .blocks import HostResident


def pin_experts(
    streaming: Streaming, program: Program, store: WeightStore, pinned: Pinned
) -> tuple[frozenset[int], str]:
    """Pins the experts that cross in prompts, layer by layer: the layers of those that are, and why
    not all are, or "".

    Args:
        program: any of the model's, placed.
    """
    layers = set[int]()
    for node, spec in streaming.experts(program):
        held: Experts = store.get(spec, cpu.CPU_DEVICE, cpu.packed)
        for part in held.slices:
            if reason := pinned.add(part.arena):
                return frozenset(layers), reason
        assert node.layer is not None
        layers.add(node.layer)
    return frozenset(layers), ""


def pin_dense(part: Program, store: WeightStore, layout_of: LayoutOf, pinned: Pinned) -> None:
    """Pins the dense weights that cross in each of a GPU's steps.

    Raises:
        PykernelsError: the system does not allow it.
    """
    for node in part.nodes:
        for port in node.weights if node.op == "load_weights" else ():
            held: HostResident = store.get(part.weight(node, port), *layout_of(node, port))
            if reason := pinned.add(held.memory):
                raise PykernelsError(
                    f"dense weights cannot cross to the GPU: {reason}",
                    "Raise the limit of locked memory (ulimit -l), or leave dense_gib at auto",
                )


def pin_caches(caches: Mapping[str, torch.Tensor], pinned: Pinned) -> None:
    """Pins those that are in main memory.

    Raises:
        PykernelsError: the system does not allow it.
    """
    for cache in caches.values():
        if cache.device.type != "cpu":
            continue
        # From the begin of the storage on, by which torch decides whether a tensor is pinned.
        memory = torch.empty(0, dtype=torch.uint8, device="cpu").set_(cache.untyped_storage())
        if reason := pinned.add(memory):
            raise PykernelsError(
                f"keys and values in main memory cannot cross to the GPU: {reason}",
                "Raise the limit of locked memory (ulimit -l), or ask for fewer kv_tokens",
            )
