"""Routing on the calling thread."""

from __future__ import annotations

import torch

from ...errors import PykernelsError
from ...shapes import RouterSpec, Routing
from ..router import MAX_EXPERTS, ROUTER, make_router
from .checks import floats, integers, optional_floats
from .serial import Record, counted, run_tasks


def router(
    logits: torch.Tensor,
    spec: RouterSpec,
    bias: torch.Tensor | None = None,
    slot_mapping: torch.Tensor | None = None,
    factors: torch.Tensor | None = None,
) -> Routing:
    """Experts of each token, best first, and their weights, on the calling thread alone.

    Args:
        logits: floats [T, E]; E is 1024 at most.
        spec: how.
        bias: floats [E], added to the scores for the choice only (e_score_correction_bias).
        slot_mapping: int32 or int64 [T]; a token with a negative number (padding) takes no expert:
            its ids are -1.
        factors: floats [E], of the experts' weights (Gemma 4's per_expert_scale).

    Returns:
        ids int64 [T, topk], weights float32 [T, topk].

    Raises:
        PykernelsError: inputs that do not fit.
    """
    logits = floats("logits", logits, "T", "E")
    T, E = logits.shape
    spec.check(E)
    if E > MAX_EXPERTS:
        raise PykernelsError(f"a router of {E} experts", f"It can have {MAX_EXPERTS} at most")
    bias = optional_floats("bias", bias, E)
    ids = torch.empty(T, spec.topk, dtype=torch.int64, device="cpu")
    weights = torch.empty(T, spec.topk, dtype=torch.float32, device="cpu")
    record = Record(
        ROUTER,
        count_at=counted(T),
        logits=logits,
        logits_stride=4 * E,
        bias=bias,
        E=E,
        topk=spec.topk,
        sigmoid=spec.scoring == "sigmoid",
        renormalize=spec.renormalize,
        min_sum=float(spec.min_sum),
        groups=spec.groups,
        group_topk=spec.group_topk,
        top2=spec.group_score == "top2",
        scale=float(spec.scale),
        factors=optional_floats("factors", factors, E),
        ids=ids,
        weights=weights,
        width=spec.topk,
        chunk=max(1, T),
    )
    run_tasks(make_router(), record.address)
    if slot_mapping is not None:
        ids.masked_fill_(integers("slot_mapping", slot_mapping, T)[:, None] < 0, -1)
    return Routing(ids, weights)
