"""Layers whose gate and up are of two formats, as GGUF files have them for which each tensor's type
was chosen (`llama-quantize --tensor-type ffn_up_exps=q6_k`).

Kernels read both in one stream, in one format: so both are dequantized to bfloat16 while loading.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

_UPS = {"gate_proj.weight": "up_proj.weight", "w1.weight": "w3.weight"}
"""Endings of the names of a dense MLP's gates, and of its ups."""


def unlike_pairs(formats: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The names of gate and up of the dense MLPs whose formats differ, of these by name."""
    for gate, fmt in formats.items():
        for ending, other in _UPS.items():
            up = gate.removesuffix(ending) + other
            if gate.endswith(ending) and formats.get(up, fmt) != fmt:
                yield gate, up


def notes(dense: Mapping[str, str], experts: Iterable[tuple[str, str]]) -> list[str]:
    """A line for each pair of formats that gate and up have somewhere in a checkpoint.

    Args:
        dense: formats of matrices by name; ``experts``: of gate and of up, of each block.
    """
    found = Counter(experts)
    found.update((dense[gate], dense[up]) for gate, up in unlike_pairs(dense))
    return [
        f"gate is {gate} and up is {up} in {count} MLPs: both are kept as bf16, which takes more"
        " memory; one type for both is faster"
        for (gate, up), count in found.items()
        if gate != up
    ]
