"""Experts on the GPU from the CPU's tiles: copied as they lie, then turned there.

Experts exist once, packed for the CPU in main memory. To have some of them on the GPU, their bytes
are copied (``copy_experts``: a run of memory a section, at the link's speed) and one kernel makes
the GPU's layout of them at the speed of its memory (``unpack_tiles``).

No product reads tiles as they are: that would spare a read and a write of the GPU's memory, which
take a few hundredths of what the link takes for the same bytes, and each kernel of each format
would have a second order of bytes to read. What stays in a slot is turned once and read often.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from ...errors import PykernelsError
from ...quant import Format
from ...quant.gguf import GGUF
from ...quant.integer import Integer
from ...quant.layout import K_BLOCK, N_BLOCK
from ...quant.zero_point import ZeroPoint
from ..common.launch import check_device
from ..gemm.weights import Matrices, kind_of
from .experts import GpuExperts
from .tiles.kernel import CHUNK, unpack_tiles_kernel
from .tiles.staging import ExpertTiles, copy_expert, copy_experts, section_bytes, supports

__all__ = [
    "ExpertTiles",
    "copy_expert",
    "copy_experts",
    "section_bytes",
    "supports",
    "unpack_tiles",
]


def unpack_tiles(
    staging: ExpertTiles, out: GpuExperts, slots: torch.Tensor, first: int = 0
) -> None:
    """Makes the GPU's matrices of staged experts, in two launches that wait for nothing.

    A captured graph reads staging and slots anew each time. Codes and scales are what
    ``GpuExperts.pack`` would make of the same weights, bit for bit; where ``out`` is bfloat16 and
    the tiles are not, weights are dequantized in float32 and rounded once.

    Args:
        out: its experts are written over.
        slots: contiguous int32 [count]: to which slot of ``out`` each staged expert goes; those
            outside 0 .. slots - 1 are passed over. No two may be the same.
        first: of experts cut across NUMA nodes (``quant.split``), the first intermediate row of
            the staged slice: the slices of an expert are unpacked one by one.

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
    unit = max(K_BLOCK, staging.down_fmt.k_block)
    last = first + shape.I
    cut = first % unit or (last % unit and last != out.I)
    fits = (shape.H, shape.spec.bias) == (out.H, out.spec.bias) and 0 <= first and last <= out.I
    if cut or not fits:
        raise PykernelsError(
            f"tiles of {shape} from row {first} on are no experts of H={out.H}, I={out.I},"
            f" {out.spec}, nor slices of them",
            f"Make room of the packed experts' shape; slices are cut at multiples of {unit}",
        )
    if reason := supports(staging.fmt, staging.down_fmt, out.H, out.I, out.fmt):
        raise PykernelsError(reason, "Make room for experts in bf16")
    up, up_scale, down, down_scale, up_bias, down_bias = staging.sections
    gated = _Part(up, up_scale, up_bias, shape.I, shape.H, first, 0)
    _launch(gated, staging.fmt, out.gate_up, out.gate_up_bias, out.fmt, slots, 2)
    through = _Part(down, down_scale, down_bias, shape.H, shape.I, 0, first)
    own_bias = None if first else out.down_bias  # the first slice has down's
    _launch(through, staging.down_fmt, out.down, own_bias, out.fmt, slots, 1)


class _Part(NamedTuple):
    """Sections of matrices [N, K] that become the rows from ``first_n`` and inputs from ``first_k``
    on of larger ones, or all of them."""

    codes: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor
    N: int
    K: int
    first_n: int
    first_k: int


def _launch(
    part: _Part,
    fmt: Format,
    to: Matrices,
    to_bias: torch.Tensor | None,
    out: Format,
    slots: torch.Tensor,
    mats: int,
) -> None:
    """One stack: ``mats`` matrices of each staged expert."""
    if not len(slots) or not len(to):
        return
    if to.data.storage_offset() * to.data.itemsize % 4:
        raise PykernelsError(
            "a stack of matrices begins within a word", "Begin it at a multiple of 4 bytes"
        )
    data = to.data.view(torch.int32)
    blocks, chunks = triton.cdiv(part.N, N_BLOCK), triton.cdiv(part.K, CHUNK)
    unpack_tiles_kernel[(blocks * chunks, mats, len(slots))](
        part.codes.view(torch.int32),
        part.scales if part.scales.numel() else None,
        None if to_bias is None else part.bias.view(torch.float32),
        data,
        None if to.scale is None else to.scale.view(torch.int32),
        to_bias,
        slots,
        len(to) // mats,
        part.N,
        part.K,
        to.N,
        to.K,
        part.first_n,
        part.first_k,
        fmt.block_bytes(part.K) // 4,
        fmt.scale_bytes(part.K),
        data.shape[-1],
        chunks,
        MATS=mats,
        KIND="int4-zp" if isinstance(fmt, ZeroPoint) else kind_of(fmt),
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
