"""How many layers' experts llama.cpp has to keep on the CPU (`-ncmoe`) for the rest to fit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from .llama_settings import Offload

ROOM = 4 << 30
"""Bytes beside weights: the CUDA context, the cache, and buffers of a step of 4,096 tokens, of
which its logits are the largest (2.5 GB for a vocabulary of 152,000)."""
_EXPERTS = re.compile(r"blk\.(\d+)\.ffn_\w+_exps\.")
_ON_THE_CPU = "token_embd.weight"


def lowest_ncmoe(sizes: Mapping[str, int], free: int) -> int:
    """The lowest `-ncmoe` whose weights fit: it keeps the experts of so many first layers.

    Args:
        sizes: bytes of each tensor of a GGUF file, by name.
        free: bytes of the GPU's memory.
    """
    experts: dict[int, int] = {}
    left = free - ROOM
    for name, nbytes in sizes.items():
        if match := _EXPERTS.match(name):
            experts[int(match[1])] = experts.get(int(match[1]), 0) + nbytes
        elif name != _ON_THE_CPU:
            left -= nbytes
    kept = len(experts)
    for layer in sorted(experts, reverse=True):
        left -= experts[layer]
        if left < 0:
            break
        kept -= 1
    return kept


def fitted(offload: Offload, model: Path) -> Offload:
    """The offload with the lowest `-ncmoe` that fits beside what is in the GPU's memory now; itself
    where it names its own."""
    if not offload.fits:
        return offload
    import gguf
    import torch

    sizes = {tensor.name: int(tensor.n_bytes) for tensor in gguf.GGUFReader(model).tensors}
    free, _ = torch.cuda.mem_get_info()
    ncmoe = lowest_ncmoe(sizes, free)
    return replace(offload, options=(*offload.options, "-ncmoe", str(ncmoe)), fits=False)
