"""The router: logits to experts and weights; with the pairs' sort in the same launch for one token.

Sources: DeepSeek-V2 (arXiv 2405.04434, 2.2.2, group-limited routing), DeepSeek-V3 (arXiv
2412.19437, 2.1.2, sigmoid scores and the bias of auxiliary-loss-free balancing).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from ...errors import PykernelsError
from ...shapes import RouterSpec, Routing, SortedPairs
from ..common.launch import check_device, launches_early, unsupported, why_not
from ..common.strides import as_bytes, check_out
from ..common.topk import topk
from .permute import MAX_EXPERTS, check_order, empty_order, permute, sort_pairs

MAX_TOPK = 64
"""Kernels are unrolled over the choices: 128 take ten seconds to compile."""
_MOST_PAIRS = 1 << 16  # of choices and experts that one program compares in registers
_ROW = 1024  # of the token's row, a program


@triton.jit
def _router(
    logits,
    bias,
    factors,
    slot_mapping,
    ids,
    weights,
    E,
    TOPK: tl.constexpr,
    KP: tl.constexpr,
    GROUPS: tl.constexpr,
    GP: tl.constexpr,
    PP: tl.constexpr,
    GROUP_TOPK: tl.constexpr,
    SIGMOID: tl.constexpr,
    TOP2: tl.constexpr,
    BIAS: tl.constexpr,
    RENORM: tl.constexpr,
    MIN_SUM: tl.constexpr,
    SCALE: tl.constexpr,
    TRIGGER: tl.constexpr,
):
    if TRIGGER:
        gdc_launch_dependents()
    row = tl.program_id(0)
    chosen, w = topk(
        logits,
        bias,
        row,
        E,
        TOPK,
        KP,
        GROUPS,
        GP,
        PP,
        GROUP_TOPK,
        SIGMOID,
        TOP2,
        BIAS,
        RENORM,
        MIN_SUM,
        SCALE,
    )
    if factors is not None:
        w *= tl.load(factors + chosen)
    if slot_mapping is not None:
        chosen = tl.where(tl.load(slot_mapping + row) < 0, -1, chosen)
    k = tl.arange(0, KP)
    tl.store(ids + row * TOPK + k, chosen, mask=k < TOPK)
    tl.store(weights + row * TOPK + k, w, mask=k < TOPK)


@triton.jit
def _route_one(
    logits,
    bias,
    factors,
    ids,
    weights,
    pairs,
    starts,
    positions,
    x,
    gathered,
    E,
    H,
    TOPK: tl.constexpr,
    KP: tl.constexpr,
    GROUPS: tl.constexpr,
    GP: tl.constexpr,
    PP: tl.constexpr,
    GROUP_TOPK: tl.constexpr,
    SIGMOID: tl.constexpr,
    TOP2: tl.constexpr,
    BIAS: tl.constexpr,
    RENORM: tl.constexpr,
    MIN_SUM: tl.constexpr,
    SCALE: tl.constexpr,
    TRIGGER: tl.constexpr,
    EP: tl.constexpr,
    GATHER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The first program chooses; each copies its part of the token's row."""
    if TRIGGER:
        gdc_launch_dependents()
    if GATHER:  # to all its rows: their order does not matter
        h = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(x + h, mask=h < H)
        for j in tl.static_range(TOPK):
            tl.store(gathered + j * H + h, values, mask=h < H)
    if tl.program_id(0) == 0:
        chosen, w = topk(
            logits,
            bias,
            tl.program_id(0),
            E,
            TOPK,
            KP,
            GROUPS,
            GP,
            PP,
            GROUP_TOPK,
            SIGMOID,
            TOP2,
            BIAS,
            RENORM,
            MIN_SUM,
            SCALE,
        )
        if factors is not None:
            w *= tl.load(factors + chosen)
        k = tl.arange(0, KP)
        mask = k < TOPK
        # Unique keys in order of expert, then of pair: a pair's rank is how many keys are smaller.
        key = tl.where(mask, chosen, E) * KP + k
        rank = tl.sum((key[None, :] < key[:, None]).to(tl.int32), 1)
        tl.store(ids + k, chosen, mask=mask)
        tl.store(weights + k, w, mask=mask)
        tl.store(pairs + rank, k, mask=mask)
        tl.store(positions + k, rank, mask=mask)
        e = tl.arange(0, EP)
        below = tl.sum((key[:, None] < e[None, :] * KP).to(tl.int32), 0)
        tl.store(starts + e, below, mask=e <= E)


def supports(logits: torch.Tensor, spec: RouterSpec, bias: torch.Tensor | None) -> str | None:
    """None if `router` takes these, or the reason why not."""
    if logits.ndim != 2 or logits.dtype != torch.float32 or not logits.is_contiguous():
        return f"logits are {logits.dtype} {tuple(logits.shape)}, not contiguous float32 [T, E]"
    E = logits.shape[1]
    if E > MAX_EXPERTS:
        return f"{E} experts are more than {MAX_EXPERTS}"
    if max(spec.topk, spec.group_topk) > MAX_TOPK:
        return f"top-{spec.topk} in {spec.group_topk} groups, {MAX_TOPK} at most of either"
    reason = why_no_vector("the bias", bias, E) or why_not(spec.check, E)
    return reason or unsupported(logits, bias)


def why_no_vector(name: str, given: torch.Tensor | None, E: int) -> str | None:
    """Why what may be left out has not a number for each expert; None if it has."""
    if given is None:
        return None
    fits = given.dtype == torch.float32 and given.shape == (E,) and given.is_contiguous()
    found = f"{given.dtype} {tuple(given.shape)}"
    return None if fits else f"{name} is {found}, not contiguous float32 [{E}]"


def _constants(spec: RouterSpec, E: int, biased: bool, device: torch.device) -> dict[str, object]:
    return {
        "TOPK": spec.topk,
        "KP": triton.next_power_of_2(spec.topk),
        "GROUPS": spec.groups,
        "GP": triton.next_power_of_2(spec.groups),
        "PP": triton.next_power_of_2(E // spec.groups),
        "GROUP_TOPK": spec.group_topk,
        "SIGMOID": spec.scoring == "sigmoid",
        "TOP2": spec.group_score == "top2",
        "BIAS": biased,
        "RENORM": spec.renormalize,
        "MIN_SUM": spec.min_sum,
        "SCALE": spec.scale,
        "TRIGGER": launches_early(device),
    }


def _prepare(
    logits: torch.Tensor,
    spec: RouterSpec,
    bias: torch.Tensor | None,
    factors: torch.Tensor | None,
    out: Routing | None,
) -> Routing:
    check_device(logits, *(given for given in (bias, factors) if given is not None))
    reason = supports(logits, spec, bias) or why_no_vector("factors", factors, logits.shape[1])
    if reason:
        raise PykernelsError(f"the router does not take these: {reason}", "Convert them")
    T, E = logits.shape
    if out is not None:
        if out.ids.dtype not in (torch.int32, torch.int64):
            raise PykernelsError(f"out's ids are {out.ids.dtype}", "Give int32 or int64")
        check_out(out.ids, logits, T, spec.topk, dtype=out.ids.dtype)
        check_out(out.weights, logits, T, spec.topk, dtype=torch.float32)
        return out
    ids = torch.empty(T, spec.topk, dtype=torch.int64, device=logits.device)
    return Routing(ids, torch.empty_like(ids, dtype=torch.float32))


def router(
    logits: torch.Tensor,
    spec: RouterSpec,
    bias: torch.Tensor | None = None,
    slot_mapping: torch.Tensor | None = None,
    factors: torch.Tensor | None = None,
    out: Routing | None = None,
) -> Routing:
    """Experts of each token, best first, of equal ones the lowest index first; and their weights.

    Args:
        logits: float32 [T, E], contiguous.
        spec: how; topk and group_topk up to ``MAX_TOPK``.
        bias: float32 [E], added to the scores for the choice only.
        slot_mapping: int32 or int64 [T], contiguous; a token with a negative number, such as the
            cache slot of padding, takes no expert: its ids are -1.
        factors: float32 [E], of the experts' weights (Gemma 4's per_expert_scale).
        out: ids int32 or int64 [T, topk] and weights float32 [T, topk] to write to.

    Raises:
        PykernelsError: other dtypes or shapes, or no Triton for this device.
    """
    out = _prepare(logits, spec, bias, factors, out)
    T, E = logits.shape
    if slot_mapping is not None and (
        slot_mapping.shape != (T,)
        or slot_mapping.dtype not in (torch.int32, torch.int64)
        or not slot_mapping.is_contiguous()
        or slot_mapping.device != logits.device
    ):
        raise PykernelsError(
            f"`slot_mapping` is {slot_mapping.dtype} {tuple(slot_mapping.shape)}"
            f" on {slot_mapping.device}",
            f"Give contiguous ints [{T}] on {logits.device}",
        )
    if T:
        constants = _constants(spec, E, bias is not None, logits.device)
        width = triton.next_power_of_2(E // spec.groups) * triton.next_power_of_2(spec.groups)
        # One warp a row: its maxima are shuffles, without barriers or shared memory.
        num_warps = max(1, min(8, width // 512))
        tensors = (logits, bias, factors, slot_mapping, out.ids, out.weights)
        _router[(T,)](*tensors, E, **constants, num_warps=num_warps)
    return out


def route(
    logits: torch.Tensor,
    spec: RouterSpec,
    bias: torch.Tensor | None = None,
    x: torch.Tensor | None = None,
    factors: torch.Tensor | None = None,
    out: tuple[Routing, SortedPairs, torch.Tensor | None] | None = None,
) -> tuple[Routing, SortedPairs, torch.Tensor | None]:
    """`router`, `sort_pairs` and, if ``x`` is given, `permute`: one launch for one token, unless
    its choices and experts are too many to be compared at once.

    Args:
        logits, spec, bias, factors: as `router`'s.
        x: [T, H], rows contiguous; None leaves out the gather.
        out: what an earlier call returned, to be written again.

    Returns:
        The routing, the pairs sorted by expert, and ``x``'s rows in that order [T * topk, H].
    """
    routing = _prepare(logits, spec, bias, factors, out[0] if out else None)
    T, E = logits.shape
    order = out[1] if out else empty_order(T, spec.topk, E, logits.device)
    check_order(order, T, spec.topk, E, logits.device)
    gathered = out[2] if out else None
    EP = triton.next_power_of_2(E + 1)
    if T != 1 or triton.next_power_of_2(spec.topk) * EP > _MOST_PAIRS:
        router(logits, spec, bias, factors=factors, out=routing)
        sort_pairs(routing.ids, E, order)
        return routing, order, None if x is None else permute(x, order, gathered)
    H, source, target = 0, None, None
    if x is not None:
        dense = x.ndim == 2 and (x.shape[1] <= 1 or x.stride(1) == 1)
        if not dense or x.shape[0] != T or x.is_complex():
            raise PykernelsError(
                f"x is {x.dtype} {tuple(x.shape)}", f"Give it contiguous rows, [{T}, H], real ones"
            )
        check_device(logits, x)
        H = x.shape[1]
        gathered = check_out(gathered, x, spec.topk, H, dtype=x.dtype)
        source, target = as_bytes(x), as_bytes(gathered)
    _route_one[(max(1, triton.cdiv(H, _ROW)),)](
        logits,
        bias,
        factors,
        routing.ids,
        routing.weights,
        order.pairs,
        order.starts,
        order.positions,
        source,
        target,
        E,
        H,
        **_constants(spec, E, bias is not None, logits.device),
        EP=EP,
        GATHER=H > 0,
        BLOCK=_ROW,
        num_warps=1 if E <= 512 else 4,
    )
    return routing, order, gathered
