"""Experts on the GPU from the CPU's tiles: copied as they lie, then turned there.

Experts exist once, packed for the CPU in main memory. To have some of them on the GPU, their bytes
are copied (``copy_experts``: a run of memory a section, at the link's speed) and one kernel makes
the GPU's layout of them at the speed of its memory (``unpack_tiles``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton

from ...errors import PykernelsError
from ...quant import Format, PackedExperts
from ...quant.gguf import GGUF
from ...quant.integer import Integer
from ...quant.layout import N_BLOCK, ceil_to
from ...quant.zero_point import ZeroPoint
from ...shapes import MoEShape
from ..common.launch import check_device
from ..gemm.weights import Matrices, kind_of, supports_format
from .experts import Experts
from .tiles.kernel import CHUNK, unpack_tiles_kernel

_ALIGN = 256
"""Sections of a staging buffer begin at multiples of so many bytes."""


@dataclass(frozen=True)
class ExpertTiles:
    """Bytes of some experts on a device, as ``PackedExperts`` lays them out.

    Attributes:
        shape: of an expert (H, I, spec); its E and topk mean nothing here.
        fmt: of gate and up; ``down_fmt``: of down.
        sections: those of ``PackedExperts.sections``: contiguous uint8 [count, bytes of one
            expert], of biases too; without bytes where it has none.
    """

    shape: MoEShape
    fmt: Format
    down_fmt: Format
    sections: tuple[torch.Tensor, ...]

    def __post_init__(self) -> None:
        sizes = section_bytes(self.shape, self.fmt, self.down_fmt)
        for section, size in zip(self.sections, sizes, strict=True):
            given = (section.dtype, tuple(section.shape[1:]), section.is_contiguous())
            if given != (torch.uint8, (size,), True) or len(section) != len(self):
                raise PykernelsError(
                    f"a section of tiles is {section.dtype} {tuple(section.shape)}",
                    f"Give contiguous uint8 [{len(self)}, {size}]",
                )
            if size and section.storage_offset() % 4:
                raise PykernelsError(
                    "a section of tiles begins within a word", "Begin it at a multiple of 4 bytes"
                )

    def __len__(self) -> int:
        return len(self.sections[0])

    @property
    def nbytes(self) -> int:
        """Bytes of all of its experts."""
        return sum(section.nbytes for section in self.sections)

    @staticmethod
    def bytes_needed(shape: MoEShape, fmt: Format, down_fmt: Format, count: int) -> int:
        """Size of a buffer for ``count`` experts."""
        sizes = section_bytes(shape, fmt, down_fmt)
        return sum(ceil_to(count * size, _ALIGN) for size in sizes)

    @classmethod
    def within(
        cls, buffer: torch.Tensor, shape: MoEShape, fmt: Format, down_fmt: Format, count: int
    ) -> ExpertTiles:
        """Room for ``count`` experts in a contiguous uint8 buffer of ``bytes_needed`` or more.

        Raises:
            PykernelsError: it is smaller, or no such buffer.
        """
        needed = cls.bytes_needed(shape, fmt, down_fmt, count)
        plain = buffer.dtype == torch.uint8 and buffer.ndim == 1 and buffer.is_contiguous()
        if not plain or buffer.numel() < needed:
            raise PykernelsError(
                f"a staging buffer is {buffer.dtype} {tuple(buffer.shape)}",
                f"Give contiguous uint8 [{needed}] for {count} experts",
            )
        sections, at = [], 0
        for size in section_bytes(shape, fmt, down_fmt):
            sections.append(buffer[at : at + count * size].view(count, size))
            at += ceil_to(count * size, _ALIGN)
        return cls(shape, fmt, down_fmt, tuple(sections))

    @classmethod
    def empty(
        cls, shape: MoEShape, fmt: Format, down_fmt: Format, count: int, device: torch.device
    ) -> ExpertTiles:
        """Room for ``count`` experts in a buffer of its own."""
        needed = cls.bytes_needed(shape, fmt, down_fmt, count)
        buffer = torch.empty(needed, dtype=torch.uint8, device=device)
        return cls.within(buffer, shape, fmt, down_fmt, count)

    def part(self, first: int, count: int) -> ExpertTiles:
        """``count`` of its experts, from the ``first`` on; no bytes are copied."""
        if first < 0 or count < 0 or first + count > len(self):
            raise PykernelsError(
                f"experts {first} to {first + count} of {len(self)} staged", "Stage more at a time"
            )
        sections = tuple(section[first : first + count] for section in self.sections)
        return ExpertTiles(self.shape, self.fmt, self.down_fmt, sections)


def section_bytes(shape: MoEShape, fmt: Format, down_fmt: Format) -> tuple[int, ...]:
    """Bytes of ONE expert in each section of ``PackedExperts``: gate_up, gate_up_scale, down,
    down_scale, gate_up_bias, down_bias."""
    i_blocks, h_blocks = (-(-rows // N_BLOCK) for rows in (shape.I, shape.H))
    bias = N_BLOCK * 4 if shape.spec.bias else 0
    return (
        2 * i_blocks * fmt.block_bytes(shape.H),
        2 * i_blocks * fmt.scale_bytes(shape.H),
        h_blocks * down_fmt.block_bytes(shape.I),
        h_blocks * down_fmt.scale_bytes(shape.I),
        2 * i_blocks * bias,
        h_blocks * bias,
    )


def copy_expert(
    packed: PackedExperts, e: int, staging: ExpertTiles, i: int, non_blocking: bool = True
) -> None:
    """Copies expert ``e`` to place ``i`` of the staging; see ``copy_experts``."""
    copy_experts(packed, range(e, e + 1), staging, i, non_blocking)


def copy_experts(
    packed: PackedExperts,
    experts: range,
    staging: ExpertTiles,
    i: int = 0,
    non_blocking: bool = True,
) -> None:
    """Copies neighbouring experts to places ``i`` .. of the staging, a run of bytes a section.

    On torch's current stream; from pinned memory and ``non_blocking`` nothing waits for it.

    Raises:
        PykernelsError: experts of another shape or format, or that there are none of, or no room.
    """
    own, theirs = staging.shape, packed.shape
    formats = (packed.fmt.name, packed.down_fmt.name)
    same = (own.H, own.I, own.spec) == (theirs.H, theirs.I, theirs.spec)
    if not same or formats != (staging.fmt.name, staging.down_fmt.name):
        raise PykernelsError(
            f"experts of {theirs} in {' and '.join(formats)} do not fit a staging for {own} in"
            f" {staging.fmt.name} and {staging.down_fmt.name}",
            "Make it of the packed experts' shape and formats",
        )
    first, last = experts.start, experts.stop
    if experts.step != 1 or first < 0 or last > theirs.E:
        raise PykernelsError(f"there are no {experts} of {theirs.E} experts", "Use 0 to E - 1")
    places = staging.part(i, len(experts)).sections
    for place, section in zip(places, packed.sections, strict=True):
        if place.numel():
            run = section[first:last].flatten(1).view(torch.uint8)
            place.copy_(run, non_blocking=non_blocking)


def supports(fmt: Format, down_fmt: Format, H: int, I: int, out: Format) -> str | None:  # noqa: E741
    """None if experts packed in these formats can become matrices of the format ``out``, or the
    reason why not. Every format can become bfloat16; one that the GPU multiplies stays itself."""
    for K in (H, I):
        if reason := supports_format(out, K):
            return reason
    names = {fmt.name, down_fmt.name}
    if out.name == "bf16" or names == {out.name}:
        return None
    return (
        f"{' and '.join(sorted(names))} cannot become {out.name} (only bf16, or one that all have)"
    )


def unpack_tiles(staging: ExpertTiles, out: Experts, slots: torch.Tensor) -> None:
    """Makes the GPU's matrices of staged experts, in two launches that wait for nothing.

    A captured graph reads staging and slots anew each time. Codes and scales are what
    ``Experts.pack`` would make of the same weights, bit for bit; where ``out`` is bfloat16 and the
    tiles are not, weights are dequantized in float32 and rounded once.

    Args:
        out: its slots are written to; its own slot table is neither read nor written.
        slots: contiguous int32 [count]: to which slot of ``out`` each staged expert goes; those
            outside 0 .. slots - 1 are passed over. No two may be the same.

    Raises:
        PykernelsError: other sizes, formats without a way, or no Triton here.
    """
    check_device(staging.sections[0], out.gate_up.data, slots)
    count = len(staging)
    if slots.dtype != torch.int32 or slots.shape != (count,) or not slots.is_contiguous():
        raise PykernelsError(
            f"the slots are {slots.dtype} {tuple(slots.shape)}",
            f"Give contiguous int32 [{count}], one for each staged expert",
        )
    shape = staging.shape
    if (shape.H, shape.I, shape.spec.bias) != (out.H, out.I, out.spec.bias):
        raise PykernelsError(
            f"tiles of {shape} cannot become experts of H={out.H}, I={out.I}, {out.spec}",
            "Make room of the packed experts' shape",
        )
    if reason := supports(staging.fmt, staging.down_fmt, shape.H, shape.I, out.fmt):
        raise PykernelsError(reason, "Make room for experts in bf16")
    up, up_scale, down, down_scale, up_bias, down_bias = staging.sections
    gated = (up, up_scale, up_bias)
    _launch(gated, staging.fmt, out.gate_up, out.gate_up_bias, out.fmt, slots, 2)
    rest = (down, down_scale, down_bias)
    _launch(rest, staging.down_fmt, out.down, out.down_bias, out.fmt, slots, 1)


def _launch(
    sections: Sequence[torch.Tensor],
    fmt: Format,
    to: Matrices,
    to_bias: torch.Tensor | None,
    out: Format,
    slots: torch.Tensor,
    mats: int,
) -> None:
    """One stack: ``mats`` matrices of each staged expert."""
    codes, scales, bias = sections
    if not len(slots) or not len(to):
        return
    if to.data.storage_offset() * to.data.itemsize % 4:
        raise PykernelsError(
            "a stack of matrices begins within a word", "Begin it at a multiple of 4 bytes"
        )
    data = to.data.view(torch.int32)
    blocks, chunks = triton.cdiv(to.N, N_BLOCK), triton.cdiv(to.K, CHUNK)
    kind = "int4-zp" if isinstance(fmt, ZeroPoint) else kind_of(fmt)
    unpack_tiles_kernel[(blocks * chunks, mats, len(slots))](
        codes.view(torch.int32),
        scales if scales.numel() else None,
        None if to_bias is None else bias.view(torch.float32),
        data,
        None if to.scale is None else to.scale.view(torch.int32),
        to_bias,
        slots,
        len(to) // mats,
        to.N,
        to.K,
        fmt.block_bytes(to.K) // 4,
        fmt.scale_bytes(to.K),
        data.shape[-1],
        chunks,
        MATS=mats,
        KIND=kind,
        BITS=fmt.bits,
        GROUP=_group(fmt),
        HALVES=fmt.halves if isinstance(fmt, GGUF) else 0,
        SMALL=fmt.small if isinstance(fmt, GGUF) else 0,
        DEQUANTIZE=fmt.name != out.name,
        num_warps=4,
    )


def _group(fmt: Format) -> int:
    """Inputs of a scale, or of a block of GGUF's; 0: all of an output's, or none at all."""
    if isinstance(fmt, Integer | ZeroPoint):
        return fmt.group
    if isinstance(fmt, GGUF):
        return fmt.k_multiple
    return {"mxfp4": 32, "fp8": 128}.get(fmt.name, 0)
