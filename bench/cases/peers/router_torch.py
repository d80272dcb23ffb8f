"""Torch's peers of the router and of the sort."""

from __future__ import annotations

import torch

from pykernels.shapes import RouterSpec


def torch_router(
    logits: torch.Tensor, spec: RouterSpec, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What transformers' modules do, in as few torch calls."""
    (T, E), G = logits.shape, spec.groups
    scores = logits.softmax(-1) if spec.scoring == "softmax" else logits.sigmoid()
    choice = scores if bias is None else scores + bias
    if G > 1:
        grouped = choice.view(T, G, E // G)
        best = grouped.topk(2 if spec.group_score == "top2" else 1, -1)[0].sum(-1)
        taken = best.topk(spec.group_topk, -1, sorted=False)[1]
        mask = torch.zeros_like(best, dtype=torch.bool).scatter_(1, taken, True)
        choice = grouped.masked_fill(~mask.unsqueeze(-1), -torch.inf).view(T, E)
    ids = choice.topk(spec.topk, -1, sorted=False)[1]
    weights = scores.gather(1, ids)
    if spec.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights * spec.scale


def torch_sort(ids: torch.Tensor, E: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Slots, starts and positions; without bincount, which waits for the device."""
    flat, slots = ids.flatten().sort(stable=True)
    starts = torch.searchsorted(flat, torch.arange(E + 1, device=ids.device))
    positions = torch.empty_like(slots)
    positions[slots] = torch.arange(len(slots), device=ids.device)
    return slots, starts, positions
