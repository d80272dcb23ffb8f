"""A matrix for each head, in plain torch: latent attention's absorbed W_UK and W_UV."""

from __future__ import annotations

import torch


def per_head_linear(
    x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """``out[t, g] = weight[g] @ x[t, g]`` (DeepSeek-V2, arXiv 2405.04434, 2.1.2).

    Args:
        x: [T, G, K], for each head its part of a query, or its sum of latents.
        weight: [G, N, K].
        dtype: of the arithmetic and of the result.

    Returns:
        [T, G, N].
    """
    return torch.einsum("tgk,gnk->tgn", x.to(dtype), weight.to(dtype))
