"""What comes before latent attention, in one launch."""

from __future__ import annotations

import torch
import triton

from ...errors import PykernelsError
from ..common.launch import FLOATS, check_device, launches_early
from ..common.strides import rows_of
from .checks import check_angles, check_cache, check_ints, supports
from .kernels import mla_write


def mla_rope_cache_write(
    q: torch.Tensor,
    kv: torch.Tensor,
    angles: torch.Tensor,
    slot_mapping: torch.Tensor,
    latent: torch.Tensor,
    rope: torch.Tensor,
    kv_norm: torch.Tensor,
    latent_scale: torch.Tensor | None = None,
    eps: float = 1e-6,
    interleaved: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Norm of the latents, rotary embedding, and both into the cache; the queries' part turned.

    Args:
        q: [T, NH, R], the part of each query that turns; the last dimension dense, so that a slice
            of wider heads is read where it lies.
        kv: [T, L + R], rows dense: latents, and the key part that turns.
        angles: float32 [T, 2, R / 2] of `rope_table`.
        slot_mapping: int32 or int64 [T], as above.
        latent: the cache, [P, page, L]; with ``latent_scale``, E4M3 (or bytes). Tokens are equally
            far apart: contiguous, or both caches slices of one [P, page, L + R].
        rope: [P, page, R], floats.
        kv_norm: [L], the weight of the latents' RMSNorm.
        latent_scale: float32 [P, page].
        eps, interleaved: as above.
        out: [T, NH, R], the last dimension dense; None: new, like ``q``.

    Returns:
        [T, NH, R].

    Raises:
        PykernelsError: other dtypes or shapes, or no Triton for this device.
    """
    given = [x for x in (latent_scale, out) if x is not None]
    check_device(q, kv, angles, slot_mapping, latent, rope, kv_norm, *given)
    if reason := supports(kv):
        raise PykernelsError(f"kv is {reason}", "Convert them")
    if q.ndim != 3 or q.dtype not in FLOATS or q.stride(2) != 1:
        raise PykernelsError(f"q is {q.dtype} {tuple(q.shape)}", "Give floats [T, NH, R], dense R")
    (T, NH, R), L = q.shape, kv_norm.shape[0]
    if kv.shape != (T, L + R) or kv_norm.dtype not in FLOATS or not kv_norm.is_contiguous():
        raise PykernelsError(
            f"kv is {tuple(kv.shape)} for a norm of {tuple(kv_norm.shape)}", f"Give {[T, L + R]}"
        )
    if latent.ndim != 3 or rope.ndim != 3 or latent.shape[:2] != rope.shape[:2]:
        raise PykernelsError(
            f"caches {tuple(latent.shape)} and {tuple(rope.shape)}", "Give [P, page, L] and [.., R]"
        )
    codes, P, page = check_cache("latents", latent, latent_scale, L), *latent.shape[:2]
    check_cache("rotated keys", rope, None, R)
    strides = rows_of(codes, "the latents")[1], rows_of(rope, "the rotated keys")[1]
    check_ints("slot_mapping", slot_mapping, T)
    check_angles(angles, T)
    if 2 * angles.shape[2] != R:
        raise PykernelsError(f"{angles.shape[2]} pairs for {R} numbers", f"Give {R // 2}")
    if out is None:
        out = q.new_empty(T, NH, R)
    if out.shape != q.shape or out.dtype not in FLOATS or out.stride(2) != 1:
        raise PykernelsError(
            f"out is {out.dtype} {tuple(out.shape)}", f"Give floats {[T, NH, R]}, dense R"
        )
    if T:
        block = triton.next_power_of_2(R)
        together = min(triton.next_power_of_2(max(NH, 1)), max(1, 2048 // block))
        mla_write[(T, 1 + triton.cdiv(NH, together))](
            q,
            kv,
            angles,
            slot_mapping,
            codes,
            rope,
            latent_scale,
            kv_norm,
            out,
            q.stride(0),
            q.stride(1),
            kv.stride(0),
            out.stride(0),
            out.stride(1),
            *strides,
            R // 2,
            NH,
            L,
            P * page,
            float(eps),
            QUANTIZE=latent_scale is not None,
            INTERLEAVED=interleaved,
            HEADS=together,
            L_BLOCK=triton.next_power_of_2(L),
            BLOCK=block,
            TRIGGER=launches_early(q.device),
            num_warps=4,
        )
    return out
