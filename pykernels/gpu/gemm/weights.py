"""Weight matrices as the GPU kernels read them: a stack of equal matrices, one tensor a part.

Nothing here is the CPU's tile layout: a row stays a run of bytes, so a checkpoint's (or a GGUF
file's) rows are copied, at most with their bytes in another order.

========= ===================================================== =================================
kind      ``data`` [B, N, ...]                                  ``scale``
========= ===================================================== =================================
``bf16``  bfloat16 [K]                                          None
``fp8``   float8_e4m3fn [K]                                     float32 [B, N / 128, K / 128]
``int8``  int8 [K]                                              see below
``int4``  uint8 [K / 2], codes ``q + 8``                        see below
``mxfp4`` uint8 [K / 2], E2M1 codes                             see below
``q4_k``  uint8 [K / 256 * 144], GGUF's blocks as they are      None
``q6_k``  uint8, GGUF's blocks by parts, see below              None
========= ===================================================== =================================

- ``int4``, ``mxfp4``: of each 64 inputs, byte i holds input i in its low half and input 32 + i in
  its high half: the order inside a Q4_K block, so they are dequantized alike.
- ``q6_k``: a row's low nibbles [K / 2], high bits [K / 4], int8 scales [K / 16] and fp16 scales
  [K / 256] (each twice), in the order of the blocks, and zeros up to a multiple of 16 bytes.
  GGUF's own blocks have 210 bytes, which leaves no load aligned.
- Integer scales, and those of ``mxfp4``, are words, since asynchronous copies have at least 4
  bytes, and those of a tile of rows are one run. Groups of 32: bfloat16 [B, K / 64, N, 2], two
  neighbouring groups in a word; other groups: float32 [B, K / group, N].
- gate and up of an expert are matrices 2 s and 2 s + 1 of one stack: transformers' fused
  ``gate_up_proj`` [E, 2 I, H] is that stack, viewed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ...errors import PykernelsError
from ...quant import Format, Weight
from ...quant.integer import Integer
from ...quant.mxfp4 import GROUP as MX_GROUP
from ...quant.mxfp4 import MXFP4

KINDS = ("bf16", "fp8", "int8", "int4", "mxfp4", "q4_k", "q6_k")
K_MULTIPLE = {
    "bf16": 8,
    "fp8": 64,
    "int8": 64,
    "int4": 64,
    "mxfp4": 64,
    "q4_k": 256,
    "q6_k": 256,
}
"""What K must be a multiple of: 16 bytes for the copies, or a kernel's step."""

_DTYPES = {
    "bf16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
    "int4": torch.uint8,
    "mxfp4": torch.uint8,
    "q4_k": torch.uint8,
    "q6_k": torch.uint8,
}
_WORD_SCALES = ("int8", "int4", "mxfp4")
_Q6_PARTS = (128, 64, 16, 4)
"""Bytes of a Q6_K block's parts in its own order, the scale at its end twice."""


@dataclass(frozen=True)
class Matrices:
    """``B`` matrices [N, K] (N outputs, K inputs) in one ``kind``; see the table above.

    Attributes:
        group: inputs of one scale (integers: 32, 128 or K; mxfp4: 32; fp8: 128), 0 where rows hold
            their own.
    """

    kind: str
    N: int
    K: int
    group: int
    data: torch.Tensor
    scale: torch.Tensor | None = None

    def __post_init__(self) -> None:
        shape = (len(self), self.N, _width(self.kind, self.K))
        if self.data.shape != shape:
            raise PykernelsError(
                f"a stack's data is {tuple(self.data.shape)}",
                f"Give {shape} for {self.kind} [{self.N}, {self.K}]",
            )
        for part in (self.data, self.scale):
            if part is None:
                continue
            if not part.is_contiguous():
                raise PykernelsError("a stack of matrices has gaps", "Make it contiguous")
            # What is dequantized is read as words.
            if self.kind != "bf16" and part.storage_offset() * part.itemsize % 4:
                raise PykernelsError(
                    "a stack of matrices begins within a word", "Begin it at a multiple of 4 bytes"
                )

    def __len__(self) -> int:
        return self.data.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of one matrix with its scales."""
        parts = (self.data, self.scale)
        return sum(part[0].nbytes for part in parts if part is not None)

    def to(self, device: torch.device | str) -> Matrices:
        scale = None if self.scale is None else self.scale.to(device)
        return replace(self, data=self.data.to(device), scale=scale)


def supports_format(fmt: Format, K: int) -> str | None:
    """None if matrices of this format with K inputs have a GPU layout, or the reason why not."""
    kind = kind_of(fmt)
    if kind not in KINDS:
        return f"{fmt.name} has no GPU layout (only {', '.join(KINDS)})"
    if K < 1 or K % K_MULTIPLE[kind]:
        return f"{fmt.name} on the GPU takes inputs in multiples of {K_MULTIPLE[kind]}, not {K}"
    return None


def kind_of(fmt: Format) -> str:
    """The kind of a format: the group of integers is no part of it."""
    return f"int{fmt.bits}" if isinstance(fmt, Integer) else fmt.name


def pack_for_gpu(fmt: Format, weights: Sequence[Weight]) -> Matrices:
    """A stack of equal matrices from a checkpoint's weights, on their device.

    Raises:
        PykernelsError: a format or a K that has no GPU layout; matrices of different shapes; scales
            of other groups than the format's.
    """
    shapes = {fmt.logical_shape(weight) for weight in weights}
    if len(shapes) != 1:
        raise PykernelsError(f"a stack of {len(shapes)} different shapes", "Pack equal matrices")
    N, K = shapes.pop()
    if reason := supports_format(fmt, K):
        raise PykernelsError(reason, "Convert the weights to another format")
    kind = kind_of(fmt)
    data = torch.stack([_rows(kind, weight.data) for weight in weights])
    if kind == "fp8":
        scale = torch.stack([_scale(weight).float() for weight in weights])
        return Matrices(kind, N, K, 128, data, scale)
    if kind in _WORD_SCALES:
        group, scales = _group(fmt, K), [_scale(weight) for weight in weights]
        if isinstance(fmt, MXFP4):
            scales = [fmt.power(scale) for scale in scales]
        if {scale.shape[1] for scale in scales} != {-(-K // group)}:
            raise PykernelsError(
                f"{sorted({scale.shape[1] for scale in scales})} scales for {K} inputs in"
                f" {fmt.name}",
                "Give one for each group; the channel formats have one for each output",
            )
        if group != K:  # those of groups are read as bfloat16, one an output as it is
            scales = [scale.bfloat16() for scale in scales]
        scale = torch.stack([_words(scale, group) for scale in scales])
        return Matrices(kind, N, K, group, data, scale)
    return Matrices(kind, N, K, 0, data)


def empty_for_gpu(fmt: Format, count: int, N: int, K: int, device: torch.device) -> Matrices:
    """A stack of ``count`` matrices of no particular values: slots to copy experts into.

    Raises:
        PykernelsError: a format or a K that has no GPU layout.
    """
    if reason := supports_format(fmt, K):
        raise PykernelsError(reason, "Convert the weights to another format")
    kind = kind_of(fmt)
    data = torch.empty(count, N, _width(kind, K), dtype=_DTYPES[kind], device=device)
    if kind == "fp8":
        scale = torch.empty(count, -(-N // 128), -(-K // 128), dtype=torch.float32, device=device)
        return Matrices(kind, N, K, 128, data, scale)
    if kind in _WORD_SCALES:
        group = _group(fmt, K)
        if group == 32:
            scale = torch.empty(count, K // 64, N, 2, dtype=torch.bfloat16, device=device)
        else:
            scale = torch.empty(count, -(-K // group), N, dtype=torch.float32, device=device)
        return Matrices(kind, N, K, group, data, scale)
    return Matrices(kind, N, K, 0, data)


def scale_every(stack: Matrices) -> int:
    """Inputs that a scale is for, as the kernels are told: 0 if it is for all of an output's."""
    return 0 if stack.group == stack.K and stack.kind != "fp8" else stack.group


def scale_words(stack: Matrices) -> torch.Tensor | None:
    """Scales as the kernels read them: those of integers as words."""
    if stack.scale is None or stack.kind == "fp8":
        return stack.scale
    return stack.scale.view(torch.int32)


def unpack_from_gpu(fmt: Format, stack: Matrices, index: int) -> Weight:
    """One matrix of a stack as ``fmt`` knows it, on the CPU: the inverse of ``pack_for_gpu``."""
    data = stack.data[index].cpu()
    scale = None if stack.scale is None else stack.scale[index].cpu()
    if stack.kind in ("int4", "mxfp4"):
        halves = data.view(stack.N, -1, 1, 32)
        data = torch.cat((halves & 15, halves >> 4), dim=2).view(stack.N, stack.K)
        if stack.kind == "int4":
            data = data.view(torch.int8) - 8
    elif stack.kind == "q6_k":
        blocks = stack.K // 256
        sizes = [blocks * part for part in _Q6_PARTS]
        parts = data[:, : sum(sizes)].split(sizes, dim=1)
        split = [part.unflatten(1, (blocks, -1)) for part in parts]
        data = torch.cat(split, dim=2)[..., :210].flatten(1)
    if scale is not None and stack.kind in _WORD_SCALES:
        by_row = scale.transpose(0, 1).flatten(1)  # a K of 64 n has whole pairs of 32
        by_row = fmt.exponent(by_row) if isinstance(fmt, MXFP4) else by_row
        scale = by_row.to(fmt.scale_dtypes[0]).contiguous()
    return Weight(data, scale)


def _width(kind: str, K: int) -> int:
    """Elements of a row of data."""
    halves = dict.fromkeys(("int4", "mxfp4"), K // 2)
    widths = {**halves, "q4_k": K // 256 * 144, "q6_k": -(-K // 256 * 212 // 16) * 16}
    return widths.get(kind, K)


def _group(fmt: Format, K: int) -> int:
    if isinstance(fmt, MXFP4):
        return MX_GROUP
    assert isinstance(fmt, Integer)
    return fmt.group or K


def _scale(weight: Weight) -> torch.Tensor:
    assert weight.scale is not None
    return weight.scale


def _words(scale: torch.Tensor, group: int) -> torch.Tensor:
    """[N, G] -> a word for each row and group, or pair of groups."""
    if group == 32:
        return scale.unflatten(1, (-1, 2)).transpose(0, 1).contiguous()
    return scale.float().T.contiguous()


def _rows(kind: str, data: torch.Tensor) -> torch.Tensor:
    if kind in ("int4", "mxfp4"):
        codes = (data + 8).view(torch.uint8) if kind == "int4" else data
        low, high = codes.unflatten(1, (-1, 2, 32)).unbind(2)
        return (low | high << 4).flatten(1)
    if kind == "q6_k":
        blocks = data.unflatten(1, (-1, 210))
        blocks = torch.cat((blocks, blocks[..., -2:]), dim=2)
        row = torch.cat([part.flatten(1) for part in blocks.split(list(_Q6_PARTS), dim=2)], dim=1)
        return torch.nn.functional.pad(row, (0, -row.shape[1] % 16))
    return data.contiguous()
