"""What a layer keeps of a sequence from step to step: parts in pages, a state in a slot, or both.

Parts in pages have a row for each token. Keys and values lie in pages of 64 tokens: bfloat16, or
E4M3 with float32 scales beside it. A scale is of one token and head (of a latent: of one token),
the largest magnitude over 448, so that nothing saturates and no calibration is needed; numbers come
back within 1/16 of themselves (a scale's smallest steps apart), where bfloat16 has 1/256. A
latent's rotated part stays bfloat16. The bytes are the same on every device.

A state is of the whole sequence, as recurrent layers have it, in float32: each step reads and
replaces it. The ops that do so read the slots of the step's sequences as ``state_slots``, and as
``has_state`` which of them go on from there: the others start from zeros, whatever is in the slot.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from pykernels.errors import PykernelsError

from ..program import Node
from ..program.ops import OPS

PAGE = 64
KV_DTYPES = ("bf16", "fp8")


@dataclass(frozen=True)
class CachePart:
    """One tensor of a layer's cache: of one token, of one sequence, or of all pages or slots."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def of(self, *leading: int) -> CachePart:
        """So many of them."""
        return CachePart((*leading, *self.shape), self.dtype)

    def zeros(self) -> torch.Tensor:
        """Its memory."""
        return torch.zeros(self.shape, dtype=self.dtype, device="cpu")


def _none() -> Mapping[str, CachePart]:
    return {}


@dataclass(frozen=True)
class CacheSpec:
    """What a layer keeps of a sequence, by the names that its ops have for the parts.

    Attributes:
        paged: of each token, in pages: keys, values, latents and the like.
        state: of the sequence, in a slot.
        window: keys that a token sees, up to its own; 0: all.
    """

    paged: Mapping[str, CachePart] = field(default_factory=_none)
    state: Mapping[str, CachePart] = field(default_factory=_none)
    window: int = 0

    @classmethod
    def grouped(cls, kv_dtype: str, KVH: int, D: int) -> CacheSpec:
        """KVH heads of keys and values, D numbers each.

        Raises:
            PykernelsError: ``kv_dtype`` is none of ``KV_DTYPES``.
        """
        check_kv_dtype(kv_dtype)
        if kv_dtype == "bf16":
            return cls(dict.fromkeys(("k", "v"), CachePart((KVH, D), torch.bfloat16)))
        codes, scales = CachePart((KVH, D), torch.float8_e4m3fn), CachePart((KVH,))
        return cls({"k": codes, "v": codes, "k_scale": scales, "v_scale": scales})

    @classmethod
    def latent(cls, kv_dtype: str, L: int, R: int) -> CacheSpec:
        """Latents of L numbers and their R rotated ones.

        Raises:
            PykernelsError: ``kv_dtype`` is none of ``KV_DTYPES``.
        """
        check_kv_dtype(kv_dtype)
        if kv_dtype == "bf16":
            return cls({"latent": CachePart((L + R,), torch.bfloat16)})
        latent = CachePart((L,), torch.float8_e4m3fn)
        rope = CachePart((R,), torch.bfloat16)
        return cls({"latent": latent, "rope": rope, "latent_scale": CachePart(())})

    @property
    def token_bytes(self) -> int:
        """Bytes that one token takes in pages."""
        return sum(part.nbytes for part in self.paged.values())

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's state."""
        return sum(part.nbytes for part in self.state.values())

    def buffers(
        self, pages: int, state_slots: int = 1, window_pages: int = 0
    ) -> dict[str, CachePart]:
        """The parts of so many pages and slots: [pages, PAGE, ...] and [state_slots, ...].

        Args:
            window_pages: where there is a window, instead of ``pages``; 0: no others.
        """
        pages = (self.window and window_pages) or pages
        paged = {name: part.of(pages, PAGE) for name, part in self.paged.items()}
        return paged | {name: part.of(state_slots) for name, part in self.state.items()}


def check_kv_dtype(kv_dtype: str) -> None:
    """Raises PykernelsError unless keys and values may be in it."""
    if kv_dtype not in KV_DTYPES:
        raise PykernelsError(f"a KV cache in {kv_dtype!r}", f"Give {' or '.join(KV_DTYPES)}")


def cache_inputs(node: Node) -> dict[str, str]:
    """The buffers of a layer's cache, or in its pages, that a node reads or writes: by its ports,
    which are the names of the parts."""
    row, buffers = OPS[node.op], {**node.outputs, **node.inputs}
    ports = {**row.outputs, **row.inputs}
    return {part: buffers[part] for part, port in ports.items() if port.paged and part in buffers}
