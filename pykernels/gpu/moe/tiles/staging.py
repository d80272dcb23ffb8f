"""Bytes of some experts on a device, as the CPU's tiles have them, and how they get there."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from ....errors import PykernelsError
from ....quant import Format, PackedExperts
from ....quant.layout import N_BLOCK, ceil_to
from ....shapes import MoEShape
from ...gemm.weights import supports_format

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
            place.copy_(storage_of_its_own(run), non_blocking=non_blocking)


def storage_of_its_own(run: torch.Tensor) -> torch.Tensor:
    """The same bytes as a tensor whose storage begins with them, valid as long as ``run``'s: by the
    begin of its storage torch decides whether a tensor is pinned, and an arena may begin behind
    that of its mapping."""
    memory = (ctypes.c_uint8 * run.nbytes).from_address(run.data_ptr())
    return torch.frombuffer(memory, dtype=torch.uint8).view(run.shape)


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


def gatherable(shape: MoEShape, fmt: Format, down_fmt: Format) -> bool:
    """Whether ``gather_experts`` takes experts of these formats: their sections are whole words."""
    return not any(size % 4 for size in section_bytes(shape, fmt, down_fmt))
