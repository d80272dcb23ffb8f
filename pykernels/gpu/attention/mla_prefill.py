"""Causal multi-head latent attention of many tokens, keys and values expanded from the latents."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import PykernelsError
from ...shapes import Ragged
from ..common.launch import why_not
from ..plans.attention import PrefillPlan
from .prefill import Inputs, checked, launch

MOST_ROTATED = 64
"""A head has so many at most: every GPU has the shared memory for them beside 256 others."""


def _inputs(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    k_nope: torch.Tensor,
    k_rope: torch.Tensor,
    v: torch.Tensor,
    batch: Ragged,
    *,
    scale: float,
    softcap: float | None = None,
) -> Inputs:
    """What both prefill ops are made of; the checks of this one done."""
    if (
        [x.ndim for x in (q_nope, q_rope, k_nope, k_rope, v)] != [3, 3, 3, 2, 3]
        or q_rope.shape[:2] != q_nope.shape[:2]
        or k_nope.shape[1:] != q_nope.shape[1:]
        or k_rope.shape != (k_nope.shape[0], q_rope.shape[2])
        or v.shape[:2] != k_nope.shape[:2]
        or batch.k_starts is None
    ):
        raise PykernelsError(
            f"q {list(q_nope.shape)} + {list(q_rope.shape)}, k {list(k_nope.shape)} + "
            f"{list(k_rope.shape)} and v {list(v.shape)} do not match",
            "Make them [TQ, NH, D], [TQ, NH, R], [TK, NH, D], [TK, R], [TK, NH, DV]",
        )
    R = q_rope.shape[2]
    if R & (R - 1) or not 16 <= R <= MOST_ROTATED:
        raise PykernelsError(
            f"a rotated part of {R}", f"It must be a power of two, 16 to {MOST_ROTATED}"
        )
    return Inputs(q_nope, k_nope, v, batch, scale, softcap, rope=(q_rope, k_rope))


def supports(*tensors: Any, **options: Any) -> str | None:
    """None if ``mla_prefill`` takes these (all but out and plan), or the reason why not."""
    return why_not(lambda: checked(_inputs(*tensors, **options)))


def mla_prefill(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    k_nope: torch.Tensor,
    k_rope: torch.Tensor,
    v: torch.Tensor,
    batch: Ragged,
    *,
    scale: float,
    softcap: float | None = None,
    out: torch.Tensor | None = None,
    plan: PrefillPlan | None = None,
) -> torch.Tensor:
    """``pykernels.ref.mla_prefill``: the same shapes, on the GPU.

    Args:
        q_nope, q_rope, k_nope, k_rope, v: bf16, any strides but the last, which is 1: halves of one
            projection need no copy, and the rotated keys are read for all heads from one place.
        out: bf16 like the result, contiguous.
        plan: instead of a tuned or the shipped one.

    Returns:
        bf16 [TQ, NH, DV]; rows of no sequence (padding) are left as they were.

    Raises:
        PykernelsError: a dtype, size or GPU that the kernel does not take.
    """
    given = _inputs(q_nope, q_rope, k_nope, k_rope, v, batch, scale=scale, softcap=softcap)
    return launch(given, out, plan)
