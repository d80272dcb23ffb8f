"""What comes before attention with grouped queries, in one launch."""

from __future__ import annotations

import torch
import triton

from ...errors import PykernelsError
from ..common.launch import FLOATS, check_device, launches_early
from .checks import check_angles, check_cache, check_ints, norm_kind, supports
from .kernels import gqa_write


def gqa_rope_cache_write(
    qkv: torch.Tensor,
    angles: torch.Tensor,
    slot_mapping: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    interleaved: bool = False,
    heads: int | None = None,
    starts: tuple[int, int, int] | None = None,
    v_norm: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Norms of queries and keys, rotary embedding of both, and keys and values into their slots.

    Args:
        qkv: [T, (NH + 2 KVH) D] or, with ``heads``, wider; bf16, fp16 or float32, rows dense:
            queries, keys, values.
        angles: float32 [T, 2, R / 2] of `rope_table`, R <= D; the first R numbers of a head turn.
        slot_mapping: int32 or int64 [T], ``page * page_size + offset``; what is outside the cache
            (-1) is not written.
        k, v: the cache, [P, page, KVH, D], contiguous; with scales, E4M3 (or bytes).
        k_scale, v_scale: float32 [P, page, KVH].
        q_norm, k_norm: weights of RMSNorm: [D] for a norm of each head, [NH D] and [KVH D] for one
            of all heads together; None: none.
        eps: of the norms.
        interleaved: pairs are (2i, 2i + 1), not (i, i + R / 2).
        heads: NH; None: what the row, which is no wider then, has beside 2 KVH.
        starts: columns of ``qkv`` where queries, keys and values begin, with ``heads``; None: they
            follow each other, from the row's beginning. Values may be the same numbers as keys.
        v_norm: whether the values of a head are normed, too, without a weight.
        out: [T, NH, D], contiguous floats; None: new, like ``qkv``.

    Returns:
        The queries, [T, NH, D].

    Raises:
        PykernelsError: other dtypes or shapes, or no Triton for this device.
    """
    given = [x for x in (k_scale, v_scale, q_norm, k_norm, out) if x is not None]
    check_device(qkv, angles, slot_mapping, k, v, *given)
    if reason := supports(qkv):
        raise PykernelsError(f"the rows are {reason}", "Convert them")
    if k.ndim != 4 or not k.is_contiguous() or not v.is_contiguous() or k.shape != v.shape:
        raise PykernelsError(
            f"caches {tuple(k.shape)} and {tuple(v.shape)}", "Give contiguous [P, page, KVH, D]"
        )
    T, (P, page, KVH, D) = qkv.shape[0], k.shape
    width = qkv.shape[1]
    NH = width // max(D, 1) - 2 * KVH if heads is None else heads
    first, second, third = starts or (0, NH * D, (NH + KVH) * D)
    whole = heads is not None or (starts is None and D > 0 and width % D == 0)
    apart = first >= 0 and first + NH * D <= second
    apart = apart and (second == third or second + KVH * D <= third)
    if not whole or not apart or third + KVH * D > width or min(NH, KVH, D) < 1:
        raise PykernelsError(
            f"rows of {width} for {heads or 'some'} heads and {KVH} of keys, {D} wide, at {starts}",
            "Give the queries, keys and values of all heads, in this order",
        )
    codes = [check_cache(n, *x, KVH, D) for n, x in (("k", (k, k_scale)), ("v", (v, v_scale)))]
    if k.dtype != v.dtype:
        raise PykernelsError(f"caches in {k.dtype} and {v.dtype}", "Give both the same dtype")
    check_ints("slot_mapping", slot_mapping, T)
    check_angles(angles, T)
    if 2 * angles.shape[2] > D:
        raise PykernelsError(f"{angles.shape[2]} pairs in heads of {D}", "Give D / 2 at most")
    norms = norm_kind("q_norm", q_norm, NH, D), norm_kind("k_norm", k_norm, KVH, D)
    if out is None:
        out = qkv.new_empty(T, NH, D)
    if out.shape != (T, NH, D) or out.dtype not in FLOATS or not out.is_contiguous():
        raise PykernelsError(
            f"out is {out.dtype} {tuple(out.shape)}", f"Give contiguous floats {[T, NH, D]}"
        )
    if T:
        block, rows = triton.next_power_of_2(D), NH + 2 * KVH
        together = min(triton.next_power_of_2(rows), max(1, 1024 // block))
        gqa_write[(T, triton.cdiv(rows, together))](
            qkv,
            angles,
            slot_mapping,
            *codes,
            k_scale,
            v_scale,
            q_norm,
            k_norm,
            out,
            qkv.stride(0),
            first,
            second,
            third,
            angles.shape[2],
            NH,
            KVH,
            D,
            P * page,
            float(eps),
            Q_NORM=norms[0],
            K_NORM=norms[1],
            V_NORM=v_norm,
            QUANTIZE=k_scale is not None,
            INTERLEAVED=interleaved,
            HEADS=together,
            BLOCK=block,
            Q_ROW=triton.next_power_of_2(NH * D),
            K_ROW=triton.next_power_of_2(KVH * D),
            TRIGGER=launches_early(qkv.device),
            num_warps=4,
        )
    return out
