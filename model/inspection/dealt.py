"""Which of several GPUs each entry of an inspection is on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from runtime.planning.placement import CPU, deal

from .entries import Entry

_LAYER = re.compile(r"\blayers\.(\d+)\.")


def dealt(entries: Sequence[Entry], gpus: Sequence[str]) -> list[Entry]:
    """The entries as the engine has them on GPUs of the same size: each layer on one, as rules say
    or by size, and what is outside of them beside its neighbour.

    Args:
        entries: in the model's order; where no rule places a layer all are on the first GPU.

    Raises:
        PykernelsError: fewer layers than GPUs.
    """
    layers, last = list[int](), 0
    for entry in entries:
        match = _LAYER.search(entry.name)
        last = int(match[1]) if match else last
        layers.append(last)
    gpu_of = {
        layer: entry.device
        for layer, entry in zip(layers, entries, strict=True)
        if _LAYER.search(entry.name) and entry.device in gpus[1:]
    }
    if not gpu_of:
        sizes = dict.fromkeys(layers, 0)
        for layer, entry in zip(layers, entries, strict=True):
            sizes[layer] += 0 if entry.device == CPU else entry.bytes
        numbers = deal(list(sizes.values()), [1 << 40] * len(gpus))
        gpu_of = {layer: gpus[n] for layer, n in zip(sizes, numbers, strict=True)}
    return [
        entry if entry.device == CPU else replace(entry, device=gpu_of.get(layer, gpus[0]))
        for layer, entry in zip(layers, entries, strict=True)
    ]
