"""The angles of rotary position embeddings (RoFormer, arXiv 2104.09864).

Frequencies, YaRN's too, are made once on the host: `rope_frequencies`, `yarn_frequencies`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..errors import PykernelsError
from ..ref.rope import rope_frequencies, yarn_frequencies, yarn_scale
from .common.launch import check_device
from .common.strides import check_out

__all__ = ["rope_frequencies", "rope_table", "yarn_frequencies", "yarn_scale"]


@triton.jit
def _rope_table(positions, frequencies, out, half, scale, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, BLOCK)
    angle = tl.load(positions + t).to(tl.float32) * tl.load(
        frequencies + pair, mask=pair < half, other=0.0
    )
    at = out + t * 2 * half + pair
    tl.store(at, tl.cos(angle) * scale, mask=pair < half)
    tl.store(at + half, tl.sin(angle) * scale, mask=pair < half)


def rope_table(
    positions: torch.Tensor,
    frequencies: torch.Tensor,
    scale: float = 1.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """cos and sin of each token's angles, times ``scale``: float32 [T, 2, R / 2].

    Args:
        positions: int32 or int64 [T].
        frequencies: float32 [R / 2].
        scale: YaRN's attention factor.
        out: float32 [T, 2, R / 2].

    Raises:
        PykernelsError: other dtypes or shapes, or no Triton for this device.
    """
    check_device(positions, frequencies, *(() if out is None else (out,)))
    integers = positions.dtype in (torch.int32, torch.int64)
    if not integers or positions.ndim != 1 or not positions.is_contiguous():
        raise PykernelsError(
            f"positions are {positions.dtype} {tuple(positions.shape)}", "Give contiguous integers"
        )
    dense = frequencies.ndim == 1 and frequencies.is_contiguous() and frequencies.numel() > 0
    if frequencies.dtype != torch.float32 or not dense:
        raise PykernelsError(
            f"frequencies are {frequencies.dtype} {tuple(frequencies.shape)}", "Give dense float32"
        )
    T, half = positions.shape[0], frequencies.shape[0]
    out = check_out(out, frequencies, T, 2, half, dtype=torch.float32)
    if T:
        _rope_table[(T,)](
            positions,
            frequencies,
            out,
            half,
            float(scale),
            BLOCK=triton.next_power_of_2(half),
            num_warps=1,
        )
    return out
