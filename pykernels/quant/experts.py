"""All routed experts of one layer, packed in the tile layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..errors import PykernelsError
from ..shapes import MoEShape
from .format import Format, Weight
from .layout import N_BLOCK, ceil_to, padded

Allocator = Callable[[int], torch.Tensor]
"""bytes -> zeroed uint8 tensor at a 64-byte-aligned address."""

Packer = Callable[[Format, Weight, torch.Tensor, torch.Tensor], None]
"""``Format.pack`` or its like: (format, weight, blocks, scales)."""

_ALIGN = 4096


def _zeros(nbytes: int) -> torch.Tensor:
    raw = torch.zeros(nbytes + 64, dtype=torch.uint8, device="cpu")
    skip = -raw.data_ptr() % 64
    return raw[skip : skip + nbytes]


def _pack(fmt: Format, weight: Weight, blocks: torch.Tensor, scales: torch.Tensor) -> None:
    fmt.pack(weight, blocks, scales)


class PackedExperts:
    """``E`` experts: gate and up blocks alternate in one stream, so that one task reads one run.

    Attributes:
        gate_up: uint8 [E, I / 32, 2, block bytes of K = H]: gate block i, then up block i.
        gate_up_scale: uint8 [E, I / 32, 2, scale bytes of K = H].
        down: uint8 [E, H / 32, block bytes of K = I].
        down_scale: uint8 [E, H / 32, scale bytes of K = I].

    Args:
        packer: what writes a matrix; ``runtime`` has one that uses every core.
    """

    def __init__(
        self,
        shape: MoEShape,
        fmt: Format,
        alloc: Allocator = _zeros,
        packer: Packer = _pack,
    ) -> None:
        self.shape, self.fmt, self._packer = shape, fmt, packer
        E, H, I = shape.E, shape.H, shape.I  # noqa: E741
        sizes = self._section_bytes(shape, fmt)
        self._arena = alloc(sum(sizes))
        gate_up, gate_up_scale, down, down_scale = self._arena.split(sizes)
        i_blocks, h_blocks = (padded(rows, 1)[0] // N_BLOCK for rows in (I, H))

        def view(section: torch.Tensor, *dims: int) -> torch.Tensor:
            return section[: torch.Size(dims).numel()].view(dims)

        self.gate_up = view(gate_up, E, i_blocks, 2, fmt.block_bytes(H))
        self.gate_up_scale = view(gate_up_scale, E, i_blocks, 2, fmt.scale_bytes(H))
        self.down = view(down, E, h_blocks, fmt.block_bytes(I))
        self.down_scale = view(down_scale, E, h_blocks, fmt.scale_bytes(I))
        self.packed = [False] * E

    @property
    def slices(self) -> Sequence[PackedExperts]:
        """Itself alone: what ``split.SplitExperts`` has one of for each NUMA node."""
        return (self,)

    @staticmethod
    def _section_bytes(shape: MoEShape, fmt: Format) -> list[int]:
        i_blocks, h_blocks = (padded(rows, 1)[0] // N_BLOCK for rows in (shape.I, shape.H))
        per_expert = (
            2 * i_blocks * fmt.block_bytes(shape.H),
            2 * i_blocks * fmt.scale_bytes(shape.H),
            h_blocks * fmt.block_bytes(shape.I),
            h_blocks * fmt.scale_bytes(shape.I),
        )
        return [ceil_to(shape.E * nbytes, _ALIGN) for nbytes in per_expert]

    @classmethod
    def bytes_needed(cls, shape: MoEShape, fmt: Format) -> int:
        """Memory of a layer's experts, scales and alignment included."""
        return sum(cls._section_bytes(shape, fmt))

    @property
    def bytes_per_expert(self) -> int:
        """Bytes that one token reads of one expert: weights and scales."""
        sections = (self.gate_up, self.gate_up_scale, self.down, self.down_scale)
        return sum(section[0].nbytes for section in sections)

    def pack(self, expert: int, gate: Weight, up: Weight, down: Weight) -> None:
        """Packs one expert: ``gate``, ``up`` [I, H], ``down`` [H, I], each in ``self.fmt``.

        Raises:
            PykernelsError: no such expert, or a matrix of another shape or format.
        """
        E, H, I = self.shape.E, self.shape.H, self.shape.I  # noqa: E741
        if not 0 <= expert < E:
            raise PykernelsError(f"there is no expert {expert} in a layer of {E}", "Use 0 to E - 1")
        for name, weight, N, K in (("gate", gate, I, H), ("up", up, I, H), ("down", down, H, I)):
            self.fmt.check(weight, N, K, f"expert {expert}'s {name}_proj")
        for i, weight in enumerate((gate, up)):
            blocks, scales = self.gate_up[expert, :, i], self.gate_up_scale[expert, :, i]
            self._packer(self.fmt, weight, blocks, scales)
        self._packer(self.fmt, down, self.down[expert], self.down_scale[expert])
        self.packed[expert] = True

    def holds(self, expert: int) -> bool:
        """Whether there is such an expert."""
        return 0 <= expert < self.shape.E

    def unpack(self, expert: int) -> tuple[Weight, Weight, Weight]:
        """(gate, up, down) of one expert, bit for bit as they were packed."""
        H, I = self.shape.H, self.shape.I  # noqa: E741
        gate, up = (
            self.fmt.unpack(self.gate_up[expert, :, i], self.gate_up_scale[expert, :, i], I, H)
            for i in range(2)
        )
        return gate, up, self.fmt.unpack(self.down[expert], self.down_scale[expert], H, I)

    def missing(self) -> list[int]:
        """Experts that were never packed."""
        return [expert for expert, done in enumerate(self.packed) if not done]
