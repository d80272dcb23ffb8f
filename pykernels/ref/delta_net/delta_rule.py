"""The gated delta rule, a layer's memory as one matrix a head, in plain torch.

Source: "Gated Delta Networks" (arXiv 2412.06464); transformers' ``modeling_qwen3_next`` for the
norms, the scale and the gates.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ...shapes import StateBatch
from .causal_conv1d import sequences


def l2_normed(x: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / sqrt(sum(x^2) + eps)`` over the last dimension."""
    return x * (x.square().sum(-1, keepdim=True) + eps).rsqrt()


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    batch: StateBatch,
    *,
    scale: float | None = None,
    eps: float = 1e-6,
    tiled: bool = False,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Each token decays its heads' states, corrects what they say of its key, and reads them.

    With k and q normed, and q scaled: ``S = exp(g) S``; ``S += k (beta (v - S^T k))^T``;
    ``out = S^T q``. A value head ``h`` has the queries and keys of head ``h // (HV / HK)``, or
    ``tiled`` those of head ``h % HK``.

    Args:
        q, k: [T, HK, DK], not normed.
        v: [T, HV, DV].
        g: float32 [T, HV], the log of the decay, at most 0.
        beta: float32 [T, HV], how much of a correction is written.
        state: float32 [slots, HV, DK, DV], read and written.
        batch: where each sequence's tokens and state lie.
        scale: of the queries; ``DK ** -0.5`` if None.
        eps: added to the sum of squares of queries and keys.
        tiled: whether value heads go over the key heads in turns, as in llama.cpp's files.
        dtype: of all arithmetic and of the result.

    Returns:
        [T, HV, DV] in ``dtype``; rows of no sequence (padding) are zeros here.
    """
    HV, DK, DV = state.shape[1:]
    scale = DK**-0.5 if scale is None else scale
    group = HV // k.shape[1]
    q, k = (l2_normed(x.to(dtype), eps) for x in (q, k))
    q, k = (x.repeat(1, group, 1) if tiled else x.repeat_interleave(group, 1) for x in (q, k))
    q, v, decay, beta = q * scale, v.to(dtype), g.to(dtype).exp(), beta.to(dtype)
    out = torch.zeros(len(v), HV, DV, dtype=dtype, device=v.device)
    for start, length, slot, past in sequences(batch):
        S = state[slot].to(dtype) if past else torch.zeros_like(state[slot], dtype=dtype)
        for t in range(start, start + length):
            S = S * decay[t, :, None, None]
            delta = (v[t] - (S * k[t, :, :, None]).sum(1)) * beta[t, :, None]
            S = S + k[t, :, :, None] * delta[:, None]
            out[t] = (S * q[t, :, :, None]).sum(1)
        state[slot] = S.to(state.dtype)
    return out


def delta_gates(
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The two gates of `gated_delta_rule` from what is projected for them.

    Args:
        a, b: [T, HV].
        a_log, dt_bias: [HV].
        dtype: of all arithmetic and of the results.

    Returns:
        (g, beta) [T, HV]: ``-exp(a_log) softplus(a + dt_bias)`` and ``sigmoid(b)``.
    """
    steps = F.softplus(a.to(dtype) + dt_bias.to(dtype))
    return -a_log.to(dtype).exp() * steps, torch.sigmoid(b.to(dtype))
