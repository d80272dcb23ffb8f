"""Routing in plain torch: the definition that the GPU's router is held against."""

from __future__ import annotations

import torch

from ..shapes import RouterSpec, Routing


def top_first(values: torch.Tensor, k: int) -> torch.Tensor:
    """Indices [.., k] of the largest values, largest first; of equal ones the lowest index first.

    torch.topk promises no order among equal values, and its CPU and CUDA versions differ there; a
    stable sort does promise one. NaN counts as the largest value, as in torch.
    """
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def router(
    logits: torch.Tensor,
    spec: RouterSpec,
    bias: torch.Tensor | None = None,
    slot_mapping: torch.Tensor | None = None,
    factors: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Routing:
    """Experts of each token, best first, and their weights.

    Where nothing else enters the choice (no bias, groups by their best), it is made by logits:
    scores rise with them, but may round to equal.

    Args:
        logits: [T, E].
        spec: how.
        bias: [E], added to the scores for the choice only (e_score_correction_bias).
        slot_mapping: ints [T]; a token with a negative number (padding) takes no expert: its ids
            are -1.
        factors: [E], of the experts' weights (Gemma 4's per_expert_scale).
        dtype: of the arithmetic.

    Returns:
        ids int64 [T, topk], weights ``dtype`` [T, topk].
    """
    T, E = logits.shape
    spec.check(E)
    logits = logits.to(dtype)
    scores = logits.softmax(-1) if spec.scoring == "softmax" else logits.sigmoid()
    by_logits = bias is None and (spec.group_score == "max" or spec.groups == 1)
    choice = logits if by_logits else scores
    if bias is not None:
        choice = choice + bias.to(dtype)
    order = top_first(choice, E)
    if spec.groups > 1:
        grouped = choice.view(T, spec.groups, E // spec.groups)
        best = grouped.topk(1 if spec.group_score == "max" else 2, dim=-1).values.sum(-1)
        taken = top_first(best, spec.group_topk)  # [T, group_topk]
        mask = torch.zeros(T, spec.groups, dtype=torch.bool, device=logits.device)
        mask.scatter_(1, taken, True)
        # Those of other groups come last, whatever they score: -inf may be a score that counts.
        within = mask.repeat_interleave(E // spec.groups, 1).gather(1, order)
        order = order.gather(1, top_first(within.int(), E))
    ids = order[:, : spec.topk].contiguous()
    weights = scores.gather(1, ids)
    if spec.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20).clamp(min=spec.min_sum)
    if factors is not None:
        weights = weights * factors.to(dtype)[ids]
    if slot_mapping is not None:
        ids = ids.masked_fill(slot_mapping[:, None] < 0, -1)
    return Routing(ids, weights * spec.scale)


def split_routing(
    ids: torch.Tensor, weights: torch.Tensor, last: int, whole: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Parts each token's choice of experts by weight (SOSP'25 4.1: immediate and deferred ones).

    Args:
        ids: int64 [T, topk], in any order; -1: not here, which is in neither part.
        weights: [T, topk].
        last: how many of the smallest weights go into the second part; of equal ones the later.
        whole: integers [T]; a token with another than 0 has all in the first part. None: none has.

    Returns:
        ids of the first and of the second part, both [T, topk]: an expert keeps its place, and is
        -1 in the other part. The weights are those of both.
    """
    here = ids >= 0
    order = top_first(weights.masked_fill(~here, -torch.inf), ids.shape[1])
    ranks = torch.arange(ids.shape[1], dtype=order.dtype, device=order.device)
    rank = torch.empty_like(order).scatter_(1, order, ranks.expand_as(order))
    is_last = rank >= here.sum(1, keepdim=True) - last
    if whole is not None:
        is_last = is_last & (whole == 0)[:, None]
    return ids.masked_fill(is_last, -1), ids.masked_fill(~is_last, -1)


def place_routing(ids: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Parts each token's choice of experts by where they are (Fiddler, arXiv 2402.07033: some in
    slots of a GPU, all of them on the CPU).

    Args:
        ids: int32 or int64 [T, topk]; outside 0..E-1: not here, which is in neither part.
        slots: int32 [E], the slot of each expert; negative: it has none.

    Returns:
        [T, topk] like ``ids``: the slots of those that have one, and the ids of the others, each in
        its place, and -1 in the other part.
    """
    known = (ids >= 0) & (ids < len(slots))
    slot = slots[ids.where(known, 0).long()].to(ids.dtype).where(known, -1)
    here = slot >= 0
    return slot.where(here, -1), ids.where(known & ~here, -1)


def rank_experts(ids: torch.Tensor, experts: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts that most tokens take (SMOE, Algorithm 1): of those with as many the first.

    Args:
        ids: int32 or int64 [T, topk]; outside 0..experts-1: of no expert.
        count: how many.

    Returns:
        slots: int32 [experts], the place of each among them; -1: it is not.
        order: int32 [count], them, the one with the most tokens first.
    """
    known = ids[(ids >= 0) & (ids < experts)].long()
    order = torch.bincount(known, minlength=experts).argsort(descending=True, stable=True)[:count]
    slots = torch.full((experts,), -1, dtype=torch.int32, device=ids.device)
    slots[order] = torch.arange(count, dtype=torch.int32, device=ids.device)
    return slots, order.to(torch.int32)


def router_logits(
    hidden: torch.Tensor, gate: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """``hidden @ gate.T``: [T, H] x [E, H] -> [T, E] in ``dtype``, from inputs of any dtype."""
    return hidden.to(dtype) @ gate.to(dtype).T
