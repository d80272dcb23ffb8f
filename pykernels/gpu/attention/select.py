"""Which plan attention is launched with: a tuned one of this GPU and shape, or the shipped one.

Shapes and the GPU alone decide, never lengths: those are on the device, and to ask for them would
wait for it. A tuned plan for what this call is not (tensors that are not aligned) is passed over.
"""

from __future__ import annotations

import functools

import torch

from ..plans.attention import (
    DecodePlan,
    PrefillPlan,
    gqa_decode_plan,
    in_lanes_takes,
    in_ring_takes,
    mla_decode_plan,
    prefill_plan,
    warp_specialized_prefills,
    warp_specialized_takes,
)
from ..plans.attention_shape import AttentionShape
from ..plans.tuned import tuned_attention


@functools.cache
def _name(device: torch.device) -> str:
    """What tuned lines call the GPU; no GPU has no name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def shipped_decode(
    op: str, shape: AttentionShape, fp8: bool, device: torch.device, aligned: bool = True
) -> DecodePlan:
    """The plan of this package for ``op`` = "mla_decode" or "gqa_decode"."""
    rows = shape.queries * shape.heads // shape.kv_heads
    lies = (fp8, shape.page, device, aligned)
    if op == "mla_decode":
        return mla_decode_plan(rows, (shape.head_dim, shape.rope), *lies)
    return gqa_decode_plan(rows, shape.head_dim, *lies)


def select_decode(
    op: str, shape: AttentionShape, fp8: bool, device: torch.device, aligned: bool
) -> DecodePlan:
    """The plan for a cache ``aligned`` to 16 bytes or not; fp8: in E4M3."""
    tuned = tuned_attention(op, "fp8" if fp8 else "bf16", _name(device), shape)
    if isinstance(tuned, DecodePlan):
        lies = (fp8, shape.page, device, aligned)
        if (
            (
                not tuned.warp_specialized
                or warp_specialized_takes(shape.head_dim, shape.rope, *lies)
            )
            and (not tuned.in_lanes or in_lanes_takes(shape.head_dim, *lies))
            and (not tuned.in_ring or in_ring_takes(shape.head_dim, *lies))
        ):
            return tuned
    return shipped_decode(op, shape, fp8, device, aligned)


def shipped_prefill(
    shape: AttentionShape, fp8: bool, unpack: bool, aligned_rows: bool, device: torch.device
) -> PrefillPlan:
    """The plan of this package."""
    sizes = (shape.head_dim, shape.value_dim, shape.rope)
    return prefill_plan(*sizes, fp8, unpack, aligned_rows, shape.page, device)


def select_prefill(
    shape: AttentionShape, fp8: bool, unpack: bool, aligned_rows: bool, device: torch.device
) -> PrefillPlan:
    """The plan for keys in E4M3 or not; see ``prefill_plan``. A rotated part makes it MLA's."""
    path = "unpacked" if unpack else "fp8" if fp8 else "bf16"
    op = "mla_prefill" if shape.rope else "gqa_prefill"
    tuned = tuned_attention(op, path, _name(device), shape)
    if isinstance(tuned, PrefillPlan):
        sizes = (shape.head_dim, shape.value_dim, shape.rope)
        if not tuned.warp_specialized or warp_specialized_prefills(
            *sizes, fp8, tuned, aligned_rows, shape.page, device
        ):
            return tuned
    return shipped_prefill(shape, fp8, unpack, aligned_rows, device)
