"""``attn_qkv``, queries, keys and values one below the other, as the three tensors that it holds.

llama.cpp's converter writes it with ``--fuse-qkv``; its loader takes either
(``create_tensor_qkv``).
"""

from __future__ import annotations

from dataclasses import replace

from ..tensors.safetensors import TensorInfo
from .metadata import Metadata, kv_heads

_FUSED = ".attn_qkv."


def split_qkv(tensors: dict[str, TensorInfo], meta: Metadata) -> dict[str, TensorInfo]:
    """The tensors, with those of that name cut between their rows."""
    found: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        if _FUSED not in name:
            found[name] = info
            continue
        heads, of_keys = meta.size("attention.head_count"), kv_heads(meta)
        sizes = {"q": heads, "k": of_keys, "v": of_keys}
        rows, every = info.shape[0], heads + 2 * of_keys
        if rows % every:  # the load plan finds a tensor without a place
            found[name] = info
            continue
        start, row_bytes = info.start, info.nbytes // rows
        for part, count in sizes.items():
            N = rows // every * count
            stop = start + N * row_bytes
            shape = (N, *info.shape[1:])
            key = name.replace(_FUSED, f".attn_{part}.")
            found[key] = replace(info, shape=shape, start=start, stop=stop)
            start = stop
    return found
