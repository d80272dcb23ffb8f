"""Attention over some of the keys, and how such parts become one (online softmax).

With ``lse`` the logarithm of the sum of a row's exponentials, two parts weigh as ``exp(lse)`` of
each. Source: flash decoding (arXiv 2311.01282), ring attention (arXiv 2310.01889).
"""

from __future__ import annotations

import torch

Partial = tuple[torch.Tensor, torch.Tensor]
"""(out [Q, NH, DV], lse [Q, NH]); a row without a key has zeros, and minus infinity."""


def partial_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float
) -> Partial:
    """Softmax over the keys of a mask alone.

    Args:
        q: [Q, NH, D]; k: [K, KVH, D]; v: [K, KVH, DV].
        mask: bool [Q, K]: which keys a query sees.
        scale: of the scores.
    """
    (Q, NH, _), KVH = q.shape, k.shape[1]
    groups = q.unflatten(1, (KVH, NH // KVH))  # [Q, KVH, G, D]
    scores = torch.einsum("qhgd,khd->qhgk", groups, k) * scale
    scores = scores.masked_fill(~mask[:, None, None], float("-inf"))
    lse = scores.logsumexp(-1)  # [Q, KVH, G]
    p = (scores - lse[..., None]).exp().nan_to_num(0.0)
    out = torch.einsum("qhgk,khd->qhgd", p, v)
    return out.reshape(Q, NH, v.shape[-1]), lse.reshape(Q, NH)


def merge_attention(first: Partial, second: Partial) -> Partial:
    """Attention over the keys of both parts, which have none in common."""
    lse = torch.logaddexp(first[1], second[1])
    weights = ((part[1] - lse).exp().nan_to_num(0.0)[..., None] for part in (first, second))
    out = sum(weight * part[0] for weight, part in zip(weights, (first, second), strict=True))
    assert isinstance(out, torch.Tensor)
    return out, lse


def merge_sinks(part: Partial, sinks: torch.Tensor) -> Partial:
    """Adds one more logit of each head, float [NH], whose probability falls to no key."""
    out, lse = part
    return merge_attention(part, (torch.zeros_like(out), sinks.to(lse.dtype).expand_as(lse)))
