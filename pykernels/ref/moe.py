"""The float truth of the routed experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..quant import PackedExperts


def moe_ffn(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    experts: PackedExperts,
    *,
    dtype: torch.dtype = torch.float32,
    h_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``sum_k weights[t, k] * expert[ids[t, k]](x[t])`` from the dequantized weights.

    Args:
        x: [T, H], any float dtype.
        ids: int64 [T, topk].
        weights: [T, topk].
        experts: packed experts; they are unpacked one at a time.
        dtype: of all arithmetic (float64 for error bounds).
        h_dtype: what ``h = silu(gate) * up`` is rounded to before the down projection: None for no
            rounding, bfloat16 for what the CPU kernels are specified to do.

    Returns:
        [T, H] in ``dtype``.
    """
    x, weights = x.to(dtype), weights.to(dtype)
    y = torch.zeros_like(x)
    for expert in ids.unique().tolist():
        gate, up, down = (experts.fmt.dequantize(w).to(dtype) for w in experts.unpack(expert))
        tokens, ranks = torch.where(ids == expert)
        rows = x[tokens]
        h = F.silu(rows @ gate.T) * (rows @ up.T)
        if h_dtype is not None:
            h = h.to(h_dtype).to(dtype)
        y.index_add_(0, tokens, (h @ down.T) * weights[tokens, ranks, None])
    return y
