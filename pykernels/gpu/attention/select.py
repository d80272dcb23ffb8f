"""The plan that attention is launched with: the given, a tuned or the shipped one.

Shapes and the GPU alone decide, never lengths: those are on the device, and to ask for them would
wait for it. A tuned plan whose kernel cannot run on these tensors (they are not aligned, say) is
passed over; a given one is an error.
"""

from __future__ import annotations

import functools

import torch

from ...errors import PykernelsError
from ..plans.attention import (
    DecodePlan,
    PrefillPlan,
    decode_kernel_runs,
    prefill_kernel_runs,
    shipped_decode,
    shipped_prefill,
)
from ..plans.attention_shape import AttentionShape
from ..plans.tuned import tuned_attention


@functools.cache
def _name(device: torch.device) -> str:
    """What tuned lines call the GPU; no GPU has no name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def select_decode(
    op: str,
    shape: AttentionShape,
    fp8: bool,
    aligned: bool,
    device: torch.device,
    plan: DecodePlan | None = None,
) -> DecodePlan:
    """The plan for a cache in E4M3 (``fp8``) or bf16, ``aligned`` to 16 bytes or not.

    Raises:
        PykernelsError: the kernel of the given plan cannot run on it here.
    """
    if plan is not None:
        if not decode_kernel_runs(op, plan, shape, fp8, aligned, device):
            heads = f"{shape.head_dim} + {shape.rope}" if shape.rope else f"{shape.head_dim}"
            raise PykernelsError(
                f"a {plan.kernel} plan of {op} for heads of {heads} in {'E4M3' if fp8 else 'bf16'},"
                f" pages of {shape.page}, {'' if aligned else 'not '}aligned to 16 bytes, on this"
                " GPU",
                f"Give a plan without {plan.kernel}",
            )
        return plan
    tuned = tuned_attention(op, "fp8" if fp8 else "bf16", _name(device), shape)
    if isinstance(tuned, DecodePlan):
        if decode_kernel_runs(op, tuned, shape, fp8, aligned, device):
            return tuned
    return shipped_decode(op, shape, fp8, device, aligned)


def select_prefill(
    shape: AttentionShape,
    fp8: bool,
    unpack: bool,
    aligned_rows: bool,
    device: torch.device,
    plan: PrefillPlan | None = None,
) -> PrefillPlan:
    """The plan for keys in E4M3 (``fp8``) or not; see ``shipped_prefill``.

    Raises:
        PykernelsError: the kernel of the given plan cannot run on them here.
    """
    if plan is not None:
        if not prefill_kernel_runs(plan, shape, fp8, aligned_rows, device):
            raise PykernelsError(
                f"the warp-specialised kernel takes no heads of {shape.head_dim} + {shape.rope} and"
                f" {shape.value_dim} like these on this GPU",
                "Give a plan without warp_specialized",
            )
        return plan
    path = "unpacked" if unpack else "fp8" if fp8 else "bf16"
    op = "mla_prefill" if shape.rope else "gqa_prefill"
    tuned = tuned_attention(op, path, _name(device), shape)
    if isinstance(tuned, PrefillPlan):
        if prefill_kernel_runs(tuned, shape, fp8, aligned_rows, device):
            return tuned
    return shipped_prefill(shape, fp8, unpack, aligned_rows, device)
