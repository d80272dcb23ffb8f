"""The router: logits to experts and weights; with the tokens' sort in the same launch for a few.

Sources: DeepSeek-V2 (arXiv 2405.04434, 2.2.2, group-limited routing), DeepSeek-V3 (arXiv
2412.19437, 2.1.2, sigmoid scores and the bias of auxiliary-loss-free balancing).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..errors import PykernelsError
from ..shapes import RouterSpec, Routing, SortedSlots
from .choose import choose
from .launch import check_device, unsupported
from .permute import empty_order, permute, sort_slots

FEW_TOKENS = 8
"""Up to so many, one launch chooses, sorts and gathers: every program repeats the choice."""
_FEW_SLOTS = 128
MAX_EXPERTS = 4096


# Numbers of tokens are not specialized: else 1 and multiples of 16 were kernels of their own.
@triton.jit(do_not_specialize=["T"])
def _router(
    logits, bias, ids, weights, T, E,
    TOPK: tl.constexpr, KP: tl.constexpr, R: tl.constexpr,
    GROUPS: tl.constexpr, GP: tl.constexpr, PP: tl.constexpr, GROUP_TOPK: tl.constexpr,
    SIGMOID: tl.constexpr, TOP2: tl.constexpr, BIAS: tl.constexpr, RENORM: tl.constexpr,
    SCALE: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * R
    chosen, w = choose(
        logits, bias, first, T, E, TOPK, KP, R,
        GROUPS, GP, PP, GROUP_TOPK, SIGMOID, TOP2, BIAS, RENORM, SCALE,
    )  # fmt: skip
    row = first + tl.arange(0, R)[:, None]
    k = tl.arange(0, KP)[None, :]
    mask = (row < T) & (k < TOPK)
    tl.store(ids + row * TOPK + k, chosen, mask=mask)
    tl.store(weights + row * TOPK + k, w, mask=mask)


@triton.jit(do_not_specialize=["T"])
def _route_few(
    logits, bias, ids, weights, slots, starts, positions, x, gathered, T, E, H, x_stride,
    TOPK: tl.constexpr, KP: tl.constexpr, R: tl.constexpr,
    GROUPS: tl.constexpr, GP: tl.constexpr, PP: tl.constexpr, GROUP_TOPK: tl.constexpr,
    SIGMOID: tl.constexpr, TOP2: tl.constexpr, BIAS: tl.constexpr, RENORM: tl.constexpr,
    SCALE: tl.constexpr, EP: tl.constexpr, GATHER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    chosen, w = choose(
        logits, bias, 0, T, E, TOPK, KP, R,
        GROUPS, GP, PP, GROUP_TOPK, SIGMOID, TOP2, BIAS, RENORM, SCALE,
    )  # fmt: skip
    row = tl.arange(0, R)[:, None]
    k = tl.arange(0, KP)[None, :]
    mask = (row < T) & (k < TOPK)
    # Unique keys in order of expert, then of slot; a slot's place is how many keys are smaller.
    key = tl.where(mask, chosen * (R * KP) + row * KP + k, 0x7FFFFFFF)
    flat = tl.reshape(key, [R * KP])
    place = tl.sum((flat[None, :] < flat[:, None]).to(tl.int32), 1)
    i = tl.arange(0, R * KP)
    slot = (i // KP) * TOPK + i % KP
    real = (i // KP < T) & (i % KP < TOPK)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(ids + row * TOPK + k, chosen, mask=mask)
        tl.store(weights + row * TOPK + k, w, mask=mask)
        tl.store(slots + place, slot, mask=real)
        tl.store(positions + slot, place, mask=real)
        e = tl.arange(0, EP)
        counts = tl.histogram(tl.reshape(tl.where(mask, chosen, E), [R * KP]), EP)
        tl.store(starts + e, tl.cumsum(counts, 0) - counts, mask=e <= E)
    if GATHER:
        token = tl.program_id(0)
        h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(x + token.to(tl.int64) * x_stride + h, mask=h < H)
        for j in tl.static_range(TOPK):
            to = tl.sum(tl.where(i == token * KP + j, place, 0), 0)
            tl.store(gathered + to.to(tl.int64) * H + h, values, mask=h < H)


def supports(logits: torch.Tensor, spec: RouterSpec, bias: torch.Tensor | None) -> str | None:
    """None if `router` takes these, or the reason why not."""
    if logits.ndim != 2 or logits.dtype != torch.float32 or not logits.is_contiguous():
        return f"logits are {logits.dtype} {tuple(logits.shape)}, not contiguous float32 [T, E]"
    E = logits.shape[1]
    if E > MAX_EXPERTS:
        return f"{E} experts are more than {MAX_EXPERTS}"
    if bias is not None and (bias.dtype != torch.float32 or bias.shape != (E,)):
        return f"the bias is {bias.dtype} {tuple(bias.shape)}, not float32 [{E}]"
    return unsupported(logits, bias)


def _constants(spec: RouterSpec, E: int, biased: bool, rows: int) -> dict[str, object]:
    return {
        "TOPK": spec.topk,
        "KP": triton.next_power_of_2(spec.topk),
        "R": rows,
        "GROUPS": spec.groups,
        "GP": triton.next_power_of_2(spec.groups),
        "PP": triton.next_power_of_2(E // spec.groups),
        "GROUP_TOPK": spec.group_topk,
        "SIGMOID": spec.scoring == "sigmoid",
        "TOP2": spec.group_score == "top2",
        "BIAS": biased,
        "RENORM": spec.renormalize,
        "SCALE": spec.scale,
    }


def _prepare(
    logits: torch.Tensor, spec: RouterSpec, bias: torch.Tensor | None, out: Routing | None
) -> Routing:
    check_device(logits, *(() if bias is None else (bias,)))
    if reason := supports(logits, spec, bias):
        raise PykernelsError(f"the router does not take these: {reason}", "Convert them")
    T, E = logits.shape
    spec.check(E)
    if out is not None:
        if out.ids.shape != (T, spec.topk) or not (
            out.ids.is_contiguous() and out.weights.is_contiguous()
        ):
            raise PykernelsError("out is not contiguous [T, topk]", "Give it that shape")
        return out
    ids = torch.empty(T, spec.topk, dtype=torch.int64, device=logits.device)
    return Routing(ids, torch.empty_like(ids, dtype=torch.float32))


def router(
    logits: torch.Tensor,
    spec: RouterSpec,
    bias: torch.Tensor | None = None,
    out: Routing | None = None,
) -> Routing:
    """Experts of each token, best first, of equal ones the lowest index first; and their weights.

    Args:
        logits: float32 [T, E], contiguous.
        spec: how.
        bias: float32 [E], added to the scores for the choice only.
        out: ids int32 or int64 [T, topk] and weights float32 [T, topk] to write to.

    Raises:
        PykernelsError: other dtypes or shapes, or no Triton for this device.
    """
    out = _prepare(logits, spec, bias, out)
    T, E = logits.shape
    if T:
        constants = _constants(spec, E, bias is not None, 1)
        width = triton.next_power_of_2(E // spec.groups) * triton.next_power_of_2(spec.groups)
        # One warp a row: its maxima are shuffles, without barriers or shared memory.
        warps = max(1, min(8, width // 512))
        _router[(T,)](logits, bias, out.ids, out.weights, T, E, **constants, num_warps=warps)
    return out


def route(
    logits: torch.Tensor,
    spec: RouterSpec,
    bias: torch.Tensor | None = None,
    x: torch.Tensor | None = None,
    out: tuple[Routing, SortedSlots, torch.Tensor | None] | None = None,
) -> tuple[Routing, SortedSlots, torch.Tensor | None]:
    """`router`, `sort_slots` and, if ``x`` is given, `permute`: one launch for few tokens.

    Args:
        logits, spec, bias: as `router`'s.
        x: [T, H], rows contiguous; None leaves out the gather.
        out: what an earlier call returned, to be written again.

    Returns:
        The routing, the slots sorted by expert, and ``x``'s rows in that order [T * topk, H].
    """
    T, E = logits.shape
    routing = _prepare(logits, spec, bias, out[0] if out else None)
    order = out[1] if out else empty_order(T, spec.topk, E, logits.device)
    few = T <= FEW_TOKENS and _slots_padded(T, spec.topk) <= _FEW_SLOTS
    if not few:
        router(logits, spec, bias, routing)
        sort_slots(routing.ids, E, order)
        return routing, order, None if x is None else permute(x, order, out[2] if out else None)
    gathered = out[2] if out else None
    H = stride = 0
    if x is not None:
        H, stride = x.shape[1], x.stride(0)
        if x.shape[0] != T or x.stride(1) != 1:
            raise PykernelsError(f"x is {tuple(x.shape)}", f"Give it contiguous rows, [{T}, H]")
        check_device(logits, x)
        if gathered is None:
            gathered = x.new_empty(T * spec.topk, H)
    rows = triton.next_power_of_2(max(T, 1))
    grid = (max(T, 1), triton.cdiv(H, 1024)) if x is not None and H else (1, 1)
    _route_few[grid](
        logits, bias, routing.ids, routing.weights, order.slots, order.starts, order.positions,
        x, gathered, T, E, H, stride,
        **_constants(spec, E, bias is not None, rows),
        EP=triton.next_power_of_2(E + 1), GATHER=x is not None and H > 0 and T > 0, BLOCK=1024,
        num_warps=1 if rows == 1 and E <= 512 else 4,
    )  # fmt: skip
    return routing, order, gathered


def _slots_padded(T: int, topk: int) -> int:
    return triton.next_power_of_2(max(T, 1)) * triton.next_power_of_2(topk)
