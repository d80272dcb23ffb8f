"""How keys and values lie in pages of 64 tokens: bfloat16, or E4M3 with float32 scales beside it.

A scale is of one token and head (of a latent: of one token), the largest magnitude over 448, so
that nothing saturates and no calibration is needed; numbers come back within 1/16 of themselves (a
scale's smallest steps apart), where bfloat16 has 1/256. A latent's rotated part stays bfloat16. The
bytes are the same on every device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from pykernels.errors import PykernelsError

from ..program import Node

PAGE = 64
KV_DTYPES = ("bf16", "fp8")


@dataclass(frozen=True)
class CachePart:
    """One tensor of a layer's cache."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def zeros(self) -> torch.Tensor:
        """Its memory."""
        return torch.zeros(self.shape, dtype=self.dtype, device="cpu")


@dataclass(frozen=True)
class Pages:
    """A number of pages, and what keys and values are in them.

    Raises:
        PykernelsError: ``kv_dtype`` is none of ``KV_DTYPES``.
    """

    count: int
    kv_dtype: str = "bf16"

    def __post_init__(self) -> None:
        if self.kv_dtype not in KV_DTYPES:
            raise PykernelsError(
                f"a KV cache in {self.kv_dtype!r}", f"Give {' or '.join(KV_DTYPES)}"
            )

    def grouped(self, KVH: int, D: int) -> dict[str, CachePart]:
        """Parts for KVH heads of keys and values, D numbers each."""
        shape = self.count, PAGE, KVH, D
        if self.kv_dtype == "bf16":
            return dict.fromkeys(("k", "v"), CachePart(shape, torch.bfloat16))
        codes, scales = CachePart(shape, torch.float8_e4m3fn), CachePart(shape[:3], torch.float32)
        return {"k": codes, "v": codes, "k_scale": scales, "v_scale": scales}

    def latent(self, L: int, R: int) -> dict[str, CachePart]:
        """Parts for latents of L numbers and their R rotated ones."""
        shape = self.count, PAGE
        if self.kv_dtype == "bf16":
            return {"latent": CachePart((*shape, L + R), torch.bfloat16)}
        return {
            "latent": CachePart((*shape, L), torch.float8_e4m3fn),
            "rope": CachePart((*shape, R), torch.bfloat16),
            "latent_scale": CachePart(shape, torch.float32),
        }


def token_bytes(parts: dict[str, CachePart]) -> int:
    """Bytes that one token takes in these parts."""
    return sum(part.nbytes // (part.shape[0] * PAGE) for part in parts.values())


PARTS = ("k", "v", "k_scale", "v_scale", "latent", "rope", "latent_scale")
"""What a layer's cache may consist of, as ops name it."""


def cache_inputs(node: Node) -> dict[str, str]:
    """The buffers of the cache that an attention node reads or writes, by the names of their parts;
    the first part is "k" or "latent"."""
    ports = {**node.outputs, **node.inputs}
    return {part: ports[part] for part in PARTS if part in ports}
