"""All routed experts of one layer, packed in the tile layout."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from ..errors import PykernelsError
from ..shapes import ExpertSpec, MoEShape
from .format import Format, Weight
from .layout import N_BLOCK, ceil_to, padded

Allocator = Callable[[int], torch.Tensor]
"""bytes -> zeroed uint8 tensor at a 64-byte-aligned address."""

Packer = Callable[[Format, Weight, torch.Tensor, torch.Tensor], None]
"""``Format.pack`` or its like: (format, weight, blocks, scales)."""

_ALIGN = 4096
_SECTIONS = ("gate_up", "gate_up_scale", "down", "down_scale", "gate_up_bias", "down_bias")
_ITEMSIZES = (1, 1, 1, 1, 4, 4)
"""The sections of ``PackedExperts`` hold bytes, and float32 biases."""


class Biases(NamedTuple):
    """Biases of one expert, any float dtype: ``gate``, ``up`` [I], ``down`` [H]."""

    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor


def aligned_zeros(nbytes: int) -> torch.Tensor:
    """uint8 [nbytes] at a 64-byte-aligned address."""
    raw = torch.zeros(nbytes + 64, dtype=torch.uint8, device="cpu")
    skip = -raw.data_ptr() % 64
    return raw[skip : skip + nbytes]


def _pack(fmt: Format, weight: Weight, blocks: torch.Tensor, scales: torch.Tensor) -> None:
    fmt.pack(weight, blocks, scales)


class PackedExperts:
    """``E`` experts: gate and up blocks alternate in one stream, so that one task reads one run.

    Attributes:
        fmt: of gate and up; ``down_fmt``: of down.
        gate_up: uint8 [E, I / 32, 2, block bytes of K = H]: gate block i, then up block i.
        gate_up_scale: uint8 [E, I / 32, 2, scale bytes of K = H].
        down: uint8 [E, H / 32, block bytes of K = I].
        down_scale: uint8 [E, H / 32, scale bytes of K = I].
        gate_up_bias: float32 [E, I / 32, 2, 32] and ``down_bias`` [E, H / 32, 32], the padding
            zeros; without elements where ``shape.spec`` has no biases.
        arena: uint8, the memory of all of them; of ``some`` that of the whole layer.

    Args:
        packer: what writes a matrix; ``runtime`` has one that uses every core.
        down_fmt: None for ``fmt``.
    """

    def __init__(
        self,
        shape: MoEShape,
        fmt: Format,
        alloc: Allocator = aligned_zeros,
        packer: Packer = _pack,
        down_fmt: Format | None = None,
    ) -> None:
        self.shape, self.fmt, self._packer = shape, fmt, packer
        self.down_fmt = down_fmt or fmt
        dims = self._section_dims(shape, fmt, self.down_fmt)
        sizes = self._section_bytes(shape, fmt, self.down_fmt)
        self.arena = alloc(sum(sizes))
        *matrices, gate_up_bias, down_bias = self.arena.split(sizes)

        def view(section: torch.Tensor, shaped: tuple[int, ...]) -> torch.Tensor:
            return section[: torch.Size(shaped).numel()].view(shaped)

        self.gate_up, self.gate_up_scale, self.down, self.down_scale = map(view, matrices, dims)
        self.gate_up_bias = view(gate_up_bias.view(torch.float32), dims[4])
        self.down_bias = view(down_bias.view(torch.float32), dims[5])
        self.packed = [False] * shape.E

    @property
    def slices(self) -> Sequence[PackedExperts]:
        """Itself alone: what ``split.SplitExperts`` has one of for each NUMA node."""
        return (self,)

    @property
    def spec(self) -> ExpertSpec:
        """What an expert does besides its products."""
        return self.shape.spec

    @property
    def sections(self) -> tuple[torch.Tensor, ...]:
        """All that an expert is, expert by expert."""
        return tuple(getattr(self, name) for name in _SECTIONS)

    @staticmethod
    def _section_dims(shape: MoEShape, fmt: Format, down_fmt: Format) -> list[tuple[int, ...]]:
        """Shapes of the sections: bytes, and float32 biases."""
        E, H, I = shape.E, shape.H, shape.I  # noqa: E741
        i_blocks, h_blocks = (padded(rows, 1)[0] // N_BLOCK for rows in (I, H))
        bias = N_BLOCK if shape.spec.bias else 0
        return [
            (E, i_blocks, 2, fmt.block_bytes(H)),
            (E, i_blocks, 2, fmt.scale_bytes(H)),
            (E, h_blocks, down_fmt.block_bytes(I)),
            (E, h_blocks, down_fmt.scale_bytes(I)),
            (E, i_blocks, 2, bias),
            (E, h_blocks, bias),
        ]

    @classmethod
    def _section_bytes(cls, shape: MoEShape, fmt: Format, down_fmt: Format) -> list[int]:
        dims = cls._section_dims(shape, fmt, down_fmt)
        return [
            ceil_to(itemsize * torch.Size(section).numel(), _ALIGN)
            for itemsize, section in zip(_ITEMSIZES, dims, strict=True)
        ]

    @classmethod
    def bytes_needed(cls, shape: MoEShape, fmt: Format, down_fmt: Format | None = None) -> int:
        """Memory of a layer's experts, scales and alignment included."""
        return sum(cls._section_bytes(shape, fmt, down_fmt or fmt))

    @classmethod
    def expert_bytes(cls, shape: MoEShape, fmt: Format, down_fmt: Format | None = None) -> int:
        """Bytes that one token reads of one expert: weights, scales and biases."""
        dims = cls._section_dims(shape, fmt, down_fmt or fmt)
        sizes = zip(_ITEMSIZES, dims, strict=True)
        return sum(itemsize * torch.Size(dim[1:]).numel() for itemsize, dim in sizes)

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return self.bytes_needed(self.shape, self.fmt, self.down_fmt)

    @property
    def bytes_per_expert(self) -> int:
        """See ``expert_bytes``."""
        return self.expert_bytes(self.shape, self.fmt, self.down_fmt)

    def pack(
        self, expert: int, gate: Weight, up: Weight, down: Weight, *, biases: Biases | None = None
    ) -> None:
        """Packs one expert: ``gate``, ``up`` [I, H] in ``self.fmt``, ``down`` [H, I] in
        ``self.down_fmt``, and its biases, where ``shape.spec`` has them.

        Raises:
            PykernelsError: no such expert, a matrix of another shape or format, biases of another
                shape, or where there are none.
        """
        check_expert(self.shape, (self.fmt, self.down_fmt), expert, (gate, up, down), biases)
        for i, weight in enumerate((gate, up)):
            blocks, scales = self.gate_up[expert, :, i], self.gate_up_scale[expert, :, i]
            self._packer(self.fmt, weight, blocks, scales)
        self._packer(self.down_fmt, down, self.down[expert], self.down_scale[expert])
        if biases is not None:
            for i, bias in enumerate((biases.gate, biases.up)):
                _write(self.gate_up_bias[expert, :, i], bias)
            _write(self.down_bias[expert], biases.down)
        self.packed[expert] = True

    def take(self, whole: PackedExperts) -> None:
        """Copies experts of the same shape and formats that are packed."""
        self.arena.copy_(whole.arena)
        self.packed = list(whole.packed)

    def some(self, first: int, last: int) -> PackedExperts:
        """Its experts ``first .. last - 1`` as a layer of their own, in the same memory."""
        found = copy.copy(self)
        found.shape = replace(self.shape, E=last - first, topk=min(self.shape.topk, last - first))
        for name in _SECTIONS:
            setattr(found, name, getattr(self, name)[first:last])
        found.packed = self.packed[first:last]
        return found

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
        return gate, up, self.down_fmt.unpack(self.down[expert], self.down_scale[expert], H, I)

    def biases(self, expert: int) -> Biases | None:
        """The biases of one expert, float32; None where there are none."""
        if not self.spec.bias:
            return None
        H, I = self.shape.H, self.shape.I  # noqa: E741
        gate, up = (self.gate_up_bias[expert, :, i].flatten()[:I] for i in range(2))
        return Biases(gate, up, self.down_bias[expert].flatten()[:H])

    def missing(self) -> list[int]:
        """Experts that were never packed."""
        return [expert for expert, done in enumerate(self.packed) if not done]


def check_expert(
    shape: MoEShape,
    formats: tuple[Format, Format],
    expert: int,
    weights: tuple[Weight, Weight, Weight],
    biases: Biases | None,
) -> None:
    """Raises what ``PackedExperts.pack`` raises; ``formats``: of gate and up, and of down."""
    E, H, I = shape.E, shape.H, shape.I  # noqa: E741
    if not 0 <= expert < E:
        raise PykernelsError(f"there is no expert {expert} in a layer of {E}", "Use 0 to E - 1")
    (fmt, down_fmt), (gate, up, down) = formats, weights
    fmt.check(gate, I, H, f"expert {expert}'s gate_proj")
    fmt.check(up, I, H, f"expert {expert}'s up_proj")
    down_fmt.check(down, H, I, f"expert {expert}'s down_proj")
    dims = None if biases is None else [tuple(bias.shape) for bias in biases]
    if dims != ([(I,), (I,), (H,)] if shape.spec.bias else None):
        raise PykernelsError(
            f"expert {expert} has {'no biases' if dims is None else f'biases of shapes {dims}'}",
            f"Give gate [{I}], up [{I}] and down [{H}]"
            if shape.spec.bias
            else "Experts with biases have them in their shape's spec",
        )


def _write(blocks: torch.Tensor, bias: torch.Tensor) -> None:
    """Writes a bias [N] into float32 [blocks, 32], zeros behind it."""
    whole = torch.zeros(blocks.numel(), dtype=torch.float32, device="cpu")
    whole[: len(bias)] = bias
    blocks.copy_(whole.view(blocks.shape))
