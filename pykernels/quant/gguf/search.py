"""Searches for the scale of a group of weights: least squares over a few grids.

Rounding to the grid that just spans a group is not the best that its codes can do: a slightly wider
or narrower one often rounds better. For each of a handful of grids the codes are rounded, the scale
(and offset) that fit those codes best are solved for, and the best of all is kept. The idea is that
of llama.cpp's quantizers for its K-quants (github.com/ggml-org/llama.cpp, ggml-quants.c), whose
weighting is used too: errors of large weights count for more.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def fit_affine(
    x: torch.Tensor, levels: int, offsets: Sequence[float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """``x`` as ``scale * code - low`` with codes 0 .. levels.

    Args:
        x: float32 [..., group].
        levels: the largest code.
        offsets: grids to try: of ``levels + offset`` steps over the group's range.

    Returns:
        (scale [...], low [...]), both at least 0.
    """
    weight = x.square().mean(-1, keepdim=True).sqrt() + x.abs()
    floor = x.amin(-1, keepdim=True).clamp(max=0)
    span = x.amax(-1, keepdim=True) - floor
    low, scale = -floor, span / levels
    best = torch.full_like(span, torch.inf)
    sum_w, sum_wx = weight.sum(-1, keepdim=True), (weight * x).sum(-1, keepdim=True)
    for offset in (None, *offsets):
        inverse = torch.where(span > 0, (levels + (offset or 0)) / span, 0)
        code = ((x - floor) * inverse).round_().clamp_(0, levels)
        if offset is None:
            try_scale, try_low = scale, low  # the plain grid, so that nothing is worse than it
        else:
            wc = weight * code
            sum_wc, sum_wcc = wc.sum(-1, keepdim=True), (wc * code).sum(-1, keepdim=True)
            sum_wxc = (wc * x).sum(-1, keepdim=True)
            det = sum_w * sum_wcc - sum_wc.square()
            try_scale = (sum_w * sum_wxc - sum_wx * sum_wc) / det
            try_low = (sum_wc * sum_wxc - sum_wcc * sum_wx) / det
            # An offset of the other sign cannot be stored, and codes that are nearly all the same
            # determine none: then the best scale without one.
            without = (try_low < 0) | (det <= 1e-5 * sum_w * sum_wcc)
            try_scale = torch.where(without, sum_wxc / sum_wcc, try_scale)
            try_low = torch.where(without, 0, try_low)
        error = (weight * (code * try_scale - try_low - x).square()).sum(-1, keepdim=True)
        better = (error < best) & (try_scale >= 0)  # False for NaN: codes that are all 0
        best = torch.where(better, error, best)
        scale = torch.where(better, try_scale, scale)
        low = torch.where(better, try_low, low)
    return scale.squeeze(-1), low.squeeze(-1)


def fit_symmetric(x: torch.Tensor, levels: int, offsets: Sequence[float]) -> torch.Tensor:
    """``x`` as ``scale * code`` with codes -levels .. levels - 1; the scale may be negative.

    Args:
        x: float32 [..., group].
        levels: minus the least code, which goes to the weight of the largest magnitude.
        offsets: grids to try: that weight at ``-(levels + offset)``.

    Returns:
        scale [...]; 0 for a group of zeros.
    """
    peak = x.gather(-1, x.abs().argmax(-1, keepdim=True))
    weight = x.square()
    scale = peak / -levels
    best = torch.full_like(peak, torch.inf)
    for offset in (None, *offsets):
        inverse = torch.where(peak != 0, -(levels + (offset or 0)) / peak, 0)
        code = (x * inverse).round_().clamp_(-levels, levels - 1)
        wc = weight * code
        fitted = (wc * x).sum(-1, keepdim=True) / (wc * code).sum(-1, keepdim=True)
        try_scale = scale if offset is None else fitted
        error = (weight * (code * try_scale - x).square()).sum(-1, keepdim=True)
        better = error < best
        best = torch.where(better, error, best)
        scale = torch.where(better, try_scale, scale)
    return scale.squeeze(-1)
