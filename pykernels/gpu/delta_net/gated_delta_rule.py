"""The gated delta rule over states in slots: token by token in a decode step, prompts in chunks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from ...errors import PykernelsError
from ...shapes import StateBatch
from ..common.launch import check_device, interpreted, why_not
from ..common.strides import check_out
from ..limits import DELTA_CHUNK as CHUNK
from .blocks import most_blocks, sequences_of
from .checks import check_floats, check_states
from .chunked import scan_chunks, within_chunks
from .recurrent import recurrent

MAX_HEAD = 128
"""Of which a chunk's keys and queries, prefetched, lie in the shared memory of any GPU."""
_CHUNKED_FROM = 16
"""Tokens of the longest sequence from which a chunk of 64 takes no longer than they do in turn."""


@dataclass(frozen=True)
class DeltaRulePlan:
    """How a call is launched.

    Attributes:
        chunked: in chunks of 64 tokens; else token by token.
        v_block: columns of a head's state that a program has.
        num_warps: of a program.
    """

    chunked: bool
    v_block: int = 32
    num_warps: int = 8


def shipped_plan(max_length: int) -> DeltaRulePlan:
    """The plan for sequences of at most so many tokens."""
    chunked = max_length >= _CHUNKED_FROM
    return DeltaRulePlan(chunked, num_warps=8 if chunked else 4)


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    batch: StateBatch,
) -> torch.device:
    device = check_device(q, k, v, g, beta, state, batch.slots)
    if k.ndim != 3 or v.ndim != 3 or not k.shape[1] or v.shape[1] % k.shape[1]:
        raise PykernelsError(
            f"keys are {tuple(k.shape)}, values {tuple(v.shape)}",
            "Give [T, HK, DK] and [T, HV, DV], HV a multiple of HK",
        )
    (T, HK, DK), (HV, DV) = k.shape, v.shape[1:]
    if not 16 <= DK <= MAX_HEAD or not 16 <= DV <= MAX_HEAD:
        raise PykernelsError(f"heads of {DK} and {DV}", f"The kernels take 16 to {MAX_HEAD}")
    for name, x, shape in (("k", k, (HK, DK)), ("q", q, (HK, DK)), ("v", v, (HV, DV))):
        check_floats(name, x, T, *shape)
    for name, x in (("g", g), ("beta", beta)):
        check_floats(name, x, T, HV, dtypes=(torch.float32,))
    check_states(state, batch, HV, DK, DV)
    return device


def supports(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    batch: StateBatch,
) -> str | None:
    """None if ``gated_delta_rule`` takes these, or the reason why not."""
    return why_not(_check, q, k, v, g, beta, state, batch)


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
    out: torch.Tensor | None = None,
    plan: DeltaRulePlan | None = None,
) -> torch.Tensor:
    """``pykernels.ref.gated_delta_rule``: the same shapes, on the GPU.

    Args:
        q, k, v: floats, any strides but the last, which is 1; heads of 16 to 128.
        g, beta: float32.
        state: float32, contiguous; sums are float32, in chunks of products in 16 bits, or in tf32
            if inputs are float32 (whose kernels spill registers on some GPUs).
        tiled: whether value head ``h`` has the key head ``h % HK``.
        out: floats [T, HV, DV], contiguous; rows of no sequence stay as they are.
        plan: instead of the shipped one.

    Returns:
        [T, HV, DV] in v's dtype.

    Raises:
        PykernelsError: a dtype, size or GPU that the kernels do not take.
    """
    _check(q, k, v, g, beta, state, batch)
    (T, HK, DK), (HV, DV) = k.shape, v.shape[1:]
    out = check_out(out, v, *v.shape)
    if not T or not batch.S or not batch.max_length:
        return out
    chosen = plan or shipped_plan(batch.max_length)
    scale = DK**-0.5 if scale is None else float(scale)
    qk_strides = (*q.stride()[:2], *k.stride()[:2])
    gate_strides = (g.stride(0), beta.stride(0))
    sequences = (batch.starts, batch.lengths, batch.slots)
    strides = (*qk_strides, *v.stride()[:2], *gate_strides)
    v_block = min(chosen.v_block, triton.next_power_of_2(DV))
    options = {"HK": HK, "GROUP": 1 if tiled else HV // HK}
    options |= {"DK": DK, "K_BLOCK": triton.next_power_of_2(DK)}
    grid, warps = (triton.cdiv(DV, v_block), HV, batch.S), chosen.num_warps
    options_of_v = {**options, "DV": DV, "V_BLOCK": v_block, "num_warps": warps}
    if not chosen.chunked:
        recurrent[grid](
            q, k, v, g, beta, state, *sequences, batch.past, out, scale, float(eps), *strides, HV,
            **options_of_v,
        )  # fmt: skip
        return out
    half = all(x.dtype == k.dtype != torch.float32 for x in (q, k, v))
    kind = k.dtype if half else torch.float32
    inverses, scores = (k.new_empty(T, HV, CHUNK, dtype=kind) for _ in "is")
    products = {"HALF": half, "WIDE": interpreted()}
    within_chunks[(most_blocks(batch, T, CHUNK), HV)](
        q, k, g, beta, *sequences, inverses, scores, scale, float(eps), *qk_strides, *gate_strides,
        HV, batch.S, SEQUENCES=sequences_of(batch, CHUNK), **options, **products, num_warps=warps,
    )  # fmt: skip
    scan_chunks[grid](
        q, k, v, g, beta, state, *sequences, batch.past, inverses, scores, out, scale, float(eps),
        *strides, HV, **options_of_v, **products, num_stages=3 if half else 1,
    )  # fmt: skip
    return out
