"""Some experts of a layer on a GPU, so that the CPU computes the rest alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from pykernels import ref
from pykernels.gpu.gemm.weights import supports_format
from pykernels.gpu.moe.experts import Experts
from pykernels.quant import Biases, Format, Weight, get_format
from pykernels.shapes import MoEShape

Gated = tuple[Weight, Weight, Weight]
"""gate [I, H], up [I, H], down [H, I]."""
Formats = tuple[str, str]
"""The format of gate and up, and that of down."""


class PinnedExperts:
    """The experts of a layer that lie on a device, and how a routing is split between it and the
    CPU. On "cpu" the float truth computes them, for tests.

    Args:
        shape: of all the layer's experts.
        pinned: their numbers, at least one and not all.
        stored: names of the formats that the CPU packs, gate's and up's, and down's; they are kept
            in it where it is one that the GPU reads, else in bfloat16.

    Attributes:
        rest: of the experts that the CPU has; ``index``: int64 [E], the number of each among
            them, -1 of those that are pinned.

    Source: Fiddler (arXiv 2402.07033); KTransformers (SOSP 2025), section 1.
    """

    def __init__(
        self, shape: MoEShape, pinned: Sequence[int], stored: Formats, device: str
    ) -> None:
        assert 0 < len(pinned) < shape.E
        self.shape, self.device = shape, torch.device(device)
        self.fmt = device_format(shape, *stored)
        self.pinned = tuple(sorted(pinned))
        left = shape.E - len(self.pinned)
        self.rest = replace(shape, E=left, topk=min(shape.topk, left))
        here = torch.ones(shape.E, dtype=torch.bool, device="cpu")
        here[list(self.pinned)] = False
        self.index = torch.where(here, here.cumsum(0) - 1, -1)
        self._weights: dict[int, tuple[Gated, Biases | None]] = {}
        self._experts: Experts | None = None

    @staticmethod
    def size(shape: MoEShape, stored: Formats) -> int:
        """Bytes of one expert on the device."""
        fmt = device_format(shape, *stored)
        biases = 4 * (2 * shape.I + shape.H) if shape.spec.bias else 0
        return 2 * _bytes(fmt, shape.I, shape.H) + _bytes(fmt, shape.H, shape.I) + biases

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert on the device."""
        return self.size(self.shape, (self.fmt.name, self.fmt.name))

    def put(self, expert: int, weights: Gated, biases: Biases | None = None) -> None:
        """Takes one expert, in ``fmt``, and its biases, where the shape's spec has them; with the
        last one they go to the device."""
        self._weights[expert] = weights, biases
        if len(self._weights) == len(self.pinned):
            both = [self._weights.pop(e) for e in self.pinned]
            given = [matrices for matrices, _ in both]
            own = [each for _, each in both if each is not None]
            slots = torch.full((self.shape.E,), -1, dtype=torch.int32, device="cpu")
            slots[list(self.pinned)] = torch.arange(len(given), dtype=torch.int32, device="cpu")
            made = Experts.pack(self.fmt, given, self.device, self.shape.spec, own)
            self._experts = made.with_slots(slots.to(self.device))

    def split(
        self, ids: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What is left of a routing on the CPU.

        Args:
            ids: int64 [T, topk]; ``weights``: float32 [T, topk]; both on the CPU.

        Returns:
            (rows, ids, weights): the tokens [R] that have an expert there; its numbers among
            those, [R, most of a token]. Of a token with fewer, one stands again with weight 0: it
            is read already.
        """
        index = self.index[ids]
        here = index >= 0
        rows = here.any(1).nonzero()[:, 0]
        order = here[rows].int().argsort(dim=1, descending=True, stable=True)
        order = order[:, : int(here.sum(1).max()) if len(rows) else 1]
        left, kept = index[rows].gather(1, order), here[rows].gather(1, order)
        shares = weights[rows].gather(1, order)
        return rows, torch.where(kept, left, left[:, :1]), torch.where(kept, shares, 0)

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """What the pinned experts add, [T, H] in x's dtype: x [T, H], the whole routing, on the
        device."""
        assert self._experts is not None, "put() has not seen them all"
        rows = x.to(torch.bfloat16).contiguous()
        if self.device.type == "cpu":
            out = ref.moe_ffn(rows, ids, weights, self._experts, h_dtype=torch.bfloat16)  # type: ignore[arg-type]
        else:
            from pykernels.gpu.moe.fused_moe import moe_ffn

            out = moe_ffn(rows, ids.contiguous(), weights.float().contiguous(), self._experts)
        return out.to(x.dtype)


def device_format(shape: MoEShape, stored: str, down_stored: str) -> Format:
    """The format in which experts stored so lie on a GPU."""
    fmt = get_format(stored)
    fits = (
        stored == down_stored
        and supports_format(fmt, shape.H) is None
        and supports_format(fmt, shape.I) is None
    )
    return fmt if fits else get_format("bf16")


def _bytes(fmt: Format, N: int, K: int) -> int:
    """Bytes of a matrix and its scales, which take two bytes at least there, padding aside."""
    scale = fmt.scale_shape(N, K)
    scales = 0 if scale is None else scale[0] * scale[1] * max(2, fmt.scale_dtypes[0].itemsize)
    return N * K * fmt.bits // 8 + scales
