"""The causal convolution of gated delta nets, and of LFM2's layers, in plain torch.

Source: transformers' ``causal_conv1d_fn`` and ``causal_conv1d_update`` (``modeling_qwen3_next``),
``Lfm2MoeShortConv``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ...shapes import StateBatch


def sequences(batch: StateBatch) -> list[tuple[int, int, int, int]]:
    """(start, length, slot, past) of the sequences that have tokens and a slot."""
    vectors = (batch.starts, batch.lengths, batch.slots, batch.past)
    rows = zip(*(x.tolist() for x in vectors), strict=True)
    return [row for row in rows if row[1] > 0 and row[2] >= 0]


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    state: torch.Tensor,
    batch: StateBatch,
    *,
    silu: bool = True,
    bias: torch.Tensor | None = None,
    gates: tuple[torch.Tensor, torch.Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """A convolution of each channel with itself over a token and the ``K - 1`` before it.

    ``out[t, c] = silu(bias[c] + sum_j weight[c, j] x[t - K + 1 + j, c])``.

    Args:
        x: [T, C].
        weight: [C, K].
        state: float32 [slots, K - 1, C], the last inputs of each sequence, oldest first; read and
            written.
        batch: where each sequence's tokens and state lie.
        silu: False: the sum itself.
        bias: [C].
        gates: [T, C] each: factors of the inputs, which the state has with them, and of the result.
        dtype: of all arithmetic and of the result.

    Returns:
        [T, C] in ``dtype``; rows of no sequence (padding) are zeros here.
    """
    C, K = weight.shape
    x = x.to(dtype) if gates is None else x.to(dtype) * gates[0].to(dtype)
    bias = None if bias is None else bias.to(dtype)
    out = torch.zeros(len(x), C, dtype=dtype, device=x.device)
    for start, length, slot, past in sequences(batch):
        before = state[slot] if past else torch.zeros_like(state[slot])
        here = slice(start, start + length)
        rows = torch.cat([before.to(dtype), x[here]])
        summed = F.conv1d(rows.T[None], weight.to(dtype)[:, None], bias, groups=C)[0].T
        out[here] = F.silu(summed) if silu else summed
        if gates is not None:
            out[here] *= gates[1][here].to(dtype)
        state[slot] = rows[len(rows) - (K - 1) :].to(state.dtype)
    return out
