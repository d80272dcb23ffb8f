"""``attn_qkv``, queries, keys and values one below the other, as the three tensors that it holds.

llama.cpp's converter writes it with ``--fuse-qkv``; its loader takes either
(``create_tensor_qkv``). Of a layer with a gated delta net it is a matrix of the model's own.
"""

from __future__ import annotations

import re
from dataclasses import replace

from ..tensors.safetensors import TensorInfo
from .metadata import Metadata
from .names import DELTA_NETS

_FUSED = re.compile(r"blk\.(?P<layer>\d+)\.attn_qkv\.")


def split_qkv(tensors: dict[str, TensorInfo], meta: Metadata) -> dict[str, TensorInfo]:
    """The tensors, with those of that name cut between their rows."""
    found: dict[str, TensorInfo] = {}
    gated = meta.architecture in DELTA_NETS  # queries have their gates beside them
    for name, info in tensors.items():
        match = _FUSED.match(name)
        if match is None or name.replace(".attn_qkv.", ".ssm_conv1d.") in tensors:
            found[name] = info
            continue
        heads = meta.size("attention.head_count")
        of_keys = dict(enumerate(meta.by_layer("attention.head_count_kv", heads)))
        count = of_keys.get(int(match["layer"]), 0)
        sizes = {"q": heads * (2 if gated else 1), "k": count, "v": count}
        rows, every = info.shape[0], sum(sizes.values())
        if not count or rows % every:  # the load plan finds a tensor without a place
            found[name] = info
            continue
        start, row_bytes = info.start, info.nbytes // rows
        for part, own in sizes.items():
            N = rows // every * own
            stop = start + N * row_bytes
            shape = (N, *info.shape[1:])
            key = name.replace(".attn_qkv.", f".attn_{part}.")
            found[key] = replace(info, shape=shape, start=start, stop=stop)
            start = stop
    return found
