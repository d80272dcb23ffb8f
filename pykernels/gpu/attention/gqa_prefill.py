"""Causal grouped-query attention of many tokens, behind a cached prefix or not: the op."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import PykernelsError
from ...shapes import Ragged
from ..common.launch import why_not
from ..plans.attention import PrefillPlan
from .checks import FP8, check_cache, check_scales
from .prefill import Inputs, checked, launch


def _inputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    batch: Ragged,
    *,
    scale: float,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> Inputs:
    """What both prefill ops are made of; the checks of this one done."""
    table = batch.page_table
    if q.ndim != 3 or k.ndim != (3 if table is None else 4) or k.shape != v.shape:
        raise PykernelsError(
            f"q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} do not match",
            "Make them [TQ, NH, D] and [TK, KVH, D], or [P, page, KVH, D] with a page table",
        )
    D, page = q.shape[-1], 0
    if table is not None:
        token = (k.shape[2], D)
        _, page = check_cache(k, "k", token, table, batch.k_lengths, batch.B)
        check_cache(v, "v", token, table, batch.k_lengths, batch.B, beside=k)
    scales = (k_scale, v_scale)
    for scaling, name in zip(scales, ("k_scale", "v_scale"), strict=True):
        check_scales(k, scaling, name, tuple(k.shape[:-1]))
    if k.dtype != v.dtype:
        raise PykernelsError(f"k is {k.dtype} and v {v.dtype}", "Both must be of one dtype")
    if table is None and k.dtype == FP8:
        raise PykernelsError(f"k is {k.dtype} without pages", "Keep it in pages, or give bfloat16")
    k, v = (x if table is None else x.flatten(0, 1) for x in (k, v))
    return Inputs(q, k, v, batch, scale, softcap, window, page, scales=scales, sinks=sinks)


def supports(*tensors: Any, **options: Any) -> str | None:
    """None if ``gqa_prefill`` takes these (all but out and plan), or the reason why not."""
    return why_not(lambda: checked(_inputs(*tensors, **options)))


def gqa_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    batch: Ragged,
    *,
    scale: float,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    plan: PrefillPlan | None = None,
) -> torch.Tensor:
    """``pykernels.ref.gqa_prefill``: the same shapes, on the GPU.

    Args:
        q, k, v: bf16, any strides but the last, which is 1; D up to 512. Pages: bf16, or E4M3 with
            scales; contiguous.
        sinks: bf16 or float32 [NH], contiguous.
        out: bf16 like the result, contiguous.
        plan: instead of a tuned or the shipped one.

    Returns:
        bf16 [TQ, NH, D]; rows of no sequence (padding) are left as they were.

    Raises:
        PykernelsError: a dtype, size or GPU that the kernel does not take.
    """
    given = _inputs(
        q,
        k,
        v,
        batch,
        scale=scale,
        k_scale=k_scale,
        v_scale=v_scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
    )
    return launch(given, out, plan)
