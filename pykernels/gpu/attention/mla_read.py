"""Cached latents gathered from their pages into rows: what a prefill behind a prefix expands."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...errors import PykernelsError
from ..common.bf16 import to_bf16
from ..common.dequant import e4m3_to_float
from ..common.launch import FLOATS, check_device, unsupported

_ROWS = 16  # tokens a CTA: 16 KiB of latents


@triton.jit
def _copy_part(
    cache, scales, out, slot, row, inside, D, DEQUANTIZE: tl.constexpr, BLOCK: tl.constexpr
):
    d = tl.arange(0, BLOCK)[None, :]
    mask = inside[:, None] & (d < D)
    value = tl.load(cache + slot[:, None] * D + d, mask=mask, other=0)
    if DEQUANTIZE:
        scale = tl.load(scales + slot, mask=inside, other=0.0)
        value = to_bf16(e4m3_to_float(value) * scale[:, None])
    tl.store(out + row[:, None] * D + d, value, mask=mask)


@triton.jit
def _gather(
    latent,
    rope,
    scales,
    table,
    starts,
    lengths,
    latent_out,
    rope_out,
    table_stride,
    page,
    L,
    R,
    DEQUANTIZE: tl.constexpr,
    LP: tl.constexpr,
    RP: tl.constexpr,
    ROWS: tl.constexpr,
):
    b = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + b)
    first = tl.program_id(0) * ROWS
    if first < length:
        token = first + tl.arange(0, ROWS)
        inside = token < length
        number = tl.load(table + b * table_stride + token // page, mask=inside, other=0)
        slot = number.to(tl.int64) * page + token % page
        row = tl.load(starts + b).to(tl.int64) + token
        _copy_part(latent, scales, latent_out, slot, row, inside, L, DEQUANTIZE, LP)
        _copy_part(rope, scales, rope_out, slot, row, inside, R, False, RP)


def supports(
    latent: torch.Tensor, rope: torch.Tensor, latent_scale: torch.Tensor | None
) -> str | None:
    """None if `mla_read` takes these caches, or the reason why not."""
    if latent.ndim != 3 or rope.ndim != 3 or latent.shape[:2] != rope.shape[:2]:
        return f"latents {tuple(latent.shape)} and rope {tuple(rope.shape)} are not [P, page, *]"
    if 0 in (latent.shape[2], rope.shape[2]):
        return f"latents {tuple(latent.shape)} or rope {tuple(rope.shape)} have empty rows"
    if not latent.is_contiguous() or not rope.is_contiguous():
        return "the caches are not contiguous"
    eight = latent.dtype in (torch.float8_e4m3fn, torch.uint8)
    if eight != (latent_scale is not None):
        return f"latents are {latent.dtype} {'without' if eight else 'with'} scales"
    if latent_scale is not None and (
        latent_scale.dtype != torch.float32
        or latent_scale.shape != latent.shape[:2]
        or not latent_scale.is_contiguous()
    ):
        return f"scales are {latent_scale.dtype} {tuple(latent_scale.shape)}, not float32 a token"
    if rope.dtype != (torch.bfloat16 if eight else latent.dtype) or rope.dtype not in FLOATS:
        return f"latents are {latent.dtype}, their rotated parts {rope.dtype}"
    return unsupported(latent, rope, latent_scale)


def mla_read(
    latent: torch.Tensor,
    rope: torch.Tensor,
    page_table: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    rows: int,
    latent_scale: torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each sequence's first tokens in the cache of `mla_decode`, as rows for `mla_prefill`.

    Token ``j`` of sequence ``b`` becomes row ``starts[b] + j``; other rows are left as they are.

    Args:
        latent: [P, page, L] floats, or E4M3 (or its bytes as uint8) with ``latent_scale``.
        rope: [P, page, R]; as the latents, bfloat16 beside E4M3.
        page_table: int32 [B, pages], rows dense: page ``j`` lies at ``latent[page_table[b, j]]``.
        starts, lengths: int32 [B].
        rows: of the results; all sequences end within them.
        latent_scale: float32 [P, page].
        out: contiguous ([rows, L], [rows, R]) of rope's dtype.

    Raises:
        PykernelsError: other dtypes or shapes, or no Triton for this device.
    """
    if reason := supports(latent, rope, latent_scale):
        raise PykernelsError(f"the cache cannot be read: {reason}", "Convert it")
    check_device(latent, rope, page_table, starts, lengths, *(out or ()))
    if page_table.ndim != 2:
        raise PykernelsError(
            f"the page table is {tuple(page_table.shape)}, not [B, pages]",
            "Give one row a sequence",
        )
    B, (page, L), R = page_table.shape[0], latent.shape[1:], rope.shape[2]
    given = (page_table, starts, lengths)
    if not starts.shape == lengths.shape == (B,) or any(
        x.dtype != torch.int32 or x.stride(-1) != 1 for x in given
    ):
        raise PykernelsError("the page table, starts and lengths do not match", "Make them int32")
    out = out or (rope.new_empty(rows, L), rope.new_empty(rows, R))
    for x, D in zip(out, (L, R), strict=True):
        if x.shape != (rows, D) or x.dtype != rope.dtype or not x.is_contiguous():
            raise PykernelsError(f"out is {x.dtype} {tuple(x.shape)}", f"Give it [{rows}, {D}]")
    blocks = triton.cdiv(min(page_table.shape[1] * page, rows), _ROWS)
    if B and blocks:
        eight = latent_scale is not None
        _gather[(blocks, B)](
            latent.view(torch.uint8) if eight else latent,
            rope,
            latent_scale,
            page_table,
            starts,
            lengths,
            *out,
            page_table.stride(0),
            page,
            L,
            R,
            DEQUANTIZE=eight,
            LP=triton.next_power_of_2(L),
            RP=triton.next_power_of_2(R),
            ROWS=_ROWS,
            num_warps=4,
        )
    return out
