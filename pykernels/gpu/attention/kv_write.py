"""Writes keys and values into a paged cache in one launch: E4M3 with a scale a row, or as is."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from ...errors import PykernelsError
from ..common.dequant import float_to_e4m3
from ..common.launch import FLOATS, check_device, launches_early, unsupported


@triton.jit
def _write_rows(
    x,
    cache,
    scales,
    t,
    group,
    slot,
    t_stride,
    group_stride,
    G,
    D,
    QUANTIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    g = group[:, None].to(tl.int64)  # heads may be 2 ** 31 elements apart
    d = tl.arange(0, BLOCK)[None, :]
    mask = (g < G) & (d < D)
    value = tl.load(x + t * t_stride + g * group_stride + d, mask=mask, other=0.0)
    at = (slot * G + g) * D + d
    if QUANTIZE:
        value = value.to(tl.float32)
        amax = tl.max(tl.abs(value), 1)  # of the numbers: NaN is no candidate
        scale = tl.div_rn(amax, tl.full(amax.shape, 448.0, tl.float32))
        scale = tl.where(scale > 0, scale, 1.0)
        scaled = tl.div_rn(value, scale[:, None] + tl.zeros_like(value))
        tl.store(cache + at, float_to_e4m3(scaled), mask=mask)
        tl.store(scales + slot * G + group, scale, mask=group < G)
    else:
        tl.store(cache + at, value.to(cache.dtype.element_ty), mask=mask)


@triton.jit
def _write(
    a,
    b,
    slot_mapping,
    a_cache,
    b_cache,
    a_scale,
    b_scale,
    a_t,
    a_g,
    b_t,
    b_g,
    A_G,
    B_G,
    A_D,
    B_D,
    NUM_SLOTS,
    A_QUANTIZE: tl.constexpr,
    B_QUANTIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    A_BLOCK: tl.constexpr,
    B_BLOCK: tl.constexpr,
    TRIGGER: tl.constexpr,
):
    if TRIGGER:
        gdc_launch_dependents()
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + t).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    if (slot >= 0) & (slot < NUM_SLOTS):
        _write_rows(a, a_cache, a_scale, t, group, slot, a_t, a_g, A_G, A_D, A_QUANTIZE, A_BLOCK)
        _write_rows(b, b_cache, b_scale, t, group, slot, b_t, b_g, B_G, B_D, B_QUANTIZE, B_BLOCK)


def supports(
    rows: torch.Tensor, cache: torch.Tensor, scales: torch.Tensor | None, name: str
) -> str | None:
    """None if rows [T, G, D] can be written to cache [P, page, G, D], or the reason why not."""
    if rows.dtype not in FLOATS or rows.ndim != 3 or rows.stride(2) != 1:
        return f"{name} is {rows.dtype} {tuple(rows.shape)}, not floats with dense rows"
    if 0 in rows.shape[1:]:
        return f"{name} is {tuple(rows.shape)}: its rows are empty"
    if cache.shape[2:] != rows.shape[1:] or not cache.is_contiguous():
        wanted = ", ".join(map(str, rows.shape[1:]))
        return f"the cache of {name} is {tuple(cache.shape)}, not contiguous [P, page, {wanted}]"
    eight = cache.dtype in (torch.float8_e4m3fn, torch.uint8)
    if not eight and cache.dtype not in FLOATS:
        return f"the cache of {name} is {cache.dtype}, not floats and not E4M3"
    if eight != (scales is not None):
        return f"the cache of {name} is {cache.dtype} {'without' if eight else 'with'} scales"
    if scales is not None and (
        scales.dtype != torch.float32
        or scales.shape != cache.shape[:-1]
        or not scales.is_contiguous()
    ):
        return f"scales of {name} are {scales.dtype} {tuple(scales.shape)}, not float32 a row"
    return unsupported(rows, cache, scales)


def _launch(
    a: torch.Tensor,
    b: torch.Tensor,
    slot_mapping: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    scales: tuple[torch.Tensor | None, torch.Tensor | None],
    names: tuple[str, str],
) -> None:
    """Rows a, b [T, G, D] of two caches [P, page, G, D]."""
    check_device(a, b, slot_mapping, *caches, *(s for s in scales if s is not None))
    for x, cache, scale, name in zip((a, b), caches, scales, names, strict=True):
        if reason := supports(x, cache, scale, name):
            raise PykernelsError(f"the cache cannot be written: {reason}", "Convert them")
    T, (P, page) = a.shape[0], caches[0].shape[:2]
    dense = slot_mapping.dtype in (torch.int32, torch.int64) and slot_mapping.is_contiguous()
    if b.shape[0] != T or slot_mapping.shape != (T,) or not dense:
        raise PykernelsError(
            f"{slot_mapping.dtype} {tuple(slot_mapping.shape)} slots for {T} and {b.shape[0]} rows",
            "Give one int32 or int64 slot a token, contiguous ones",
        )
    if caches[1].shape[:2] != (P, page):
        raise PykernelsError("the two caches have other pages", "Give both the same pages")
    A_G, B_G, A_D, B_D = a.shape[1], b.shape[1], a.shape[2], b.shape[2]
    if T == 0:
        return
    blocks = triton.next_power_of_2(A_D), triton.next_power_of_2(B_D)
    groups = min(triton.next_power_of_2(max(A_G, B_G)), max(1, 1024 // max(blocks)))
    codes = [c if s is None else c.view(torch.uint8) for c, s in zip(caches, scales, strict=True)]
    _write[(T, triton.cdiv(max(A_G, B_G), groups))](
        a,
        b,
        slot_mapping,
        *codes,
        *scales,
        a.stride(0),
        a.stride(1),
        b.stride(0),
        b.stride(1),
        A_G,
        B_G,
        A_D,
        B_D,
        P * page,
        A_QUANTIZE=scales[0] is not None,
        B_QUANTIZE=scales[1] is not None,
        GROUPS=groups,
        A_BLOCK=blocks[0],
        B_BLOCK=blocks[1],
        TRIGGER=launches_early(a.device),
        num_warps=4,
    )


def mla_write(
    latent: torch.Tensor,
    rope: torch.Tensor,
    slot_mapping: torch.Tensor,
    latent_cache: torch.Tensor,
    rope_cache: torch.Tensor,
    latent_scale: torch.Tensor | None = None,
) -> None:
    """Writes latents and their rotated parts to their slots in the cache of `mla_decode`.

    Args:
        latent: [T, L], rows dense.
        rope: [T, R], rows dense.
        slot_mapping: int32 or int64 [T], ``page * page_size + offset``; a token whose slot is
            outside the cache (negative: padding; or ``P * page_size`` and more) is written nowhere.
        latent_cache: [P, page, L]; with ``latent_scale``, E4M3 (or its bytes as uint8).
        rope_cache: [P, page, R].
        latent_scale: float32 [P, page]: the largest magnitude of a row's numbers over 448, 1 if
            that is 0. NaN stays NaN, the numbers beside it stay what they are.

    Raises:
        PykernelsError: other dtypes or shapes, or no Triton for this device.
    """
    for name, x, ndim in (
        ("latent", latent, 2),
        ("rope", rope, 2),
        ("latent_cache", latent_cache, 3),
        ("rope_cache", rope_cache, 3),
        *(() if latent_scale is None else (("latent_scale", latent_scale, 2),)),
    ):
        if x.ndim != ndim:
            raise PykernelsError(f"{name} is {tuple(x.shape)}", f"Give it {ndim} dimensions")
    _launch(
        latent.unsqueeze(1),
        rope.unsqueeze(1),
        slot_mapping,
        (latent_cache.unsqueeze(2), rope_cache.unsqueeze(2)),
        (None if latent_scale is None else latent_scale.unsqueeze(2), None),
        ("latent", "rope"),
    )


def kv_write(
    k: torch.Tensor,
    v: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Writes keys and values to their slots in the cache of `gqa_decode`.

    Args:
        k, v: [T, KVH, D], the last dimension dense.
        slot_mapping: as above.
        k_cache, v_cache: [P, page, KVH, D]; with scales, E4M3 (or its bytes as uint8).
        k_scale, v_scale: float32 [P, page, KVH], one a token and head.

    Raises:
        PykernelsError: other dtypes or shapes, or no Triton for this device.
    """
    _launch(k, v, slot_mapping, (k_cache, v_cache), (k_scale, v_scale), ("k", "v"))
