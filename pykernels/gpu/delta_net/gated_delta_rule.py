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
from .chunked import outputs_of_chunks, scan_chunks, within_chunks
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
        num_warps: of a program, in chunks of one that needs no state.
        scan_warps, num_stages: of one that goes from chunk to chunk.
        out_block, out_warps: columns and warps of one that writes a chunk's outputs.
    """

    chunked: bool
    v_block: int = 32
    num_warps: int = 4
    scan_warps: int = 4
    num_stages: int = 3
    out_block: int = 128
    out_warps: int = 4


def shipped_plan(max_length: int) -> DeltaRulePlan:
    """The plan for sequences of at most so many tokens."""
    if max_length >= _CHUNKED_FROM:
        return DeltaRulePlan(True)
    # Of 1, 8 and 32 sequences an H200 ran this one fastest, or within 3 % of the fastest.
    return DeltaRulePlan(False, v_block=16, num_warps=1)


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
    heads = {"HK": HK, "GROUP": 1 if tiled else HV // HK, "DK": DK, "DV": DV}
    options = {**heads, "K_BLOCK": triton.next_power_of_2(DK)}
    scale = DK**-0.5 if scale is None else float(scale)
    run = _in_chunks if chosen.chunked else _in_turn
    run(q, k, v, g, beta, state, batch, scale, float(eps), out, chosen, options)
    return out


def _in_turn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    batch: StateBatch,
    scale: float,
    eps: float,
    out: torch.Tensor,
    plan: DeltaRulePlan,
    options: dict[str, int],
) -> None:
    HV, DV = v.shape[1:]
    v_block = min(plan.v_block, triton.next_power_of_2(DV))
    recurrent[(triton.cdiv(DV, v_block), HV, batch.S)](
        q, k, v, g, beta, state, batch.starts, batch.lengths, batch.slots, batch.past, out, scale,
        eps, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], g.stride(0), beta.stride(0), HV,
        **options, V_BLOCK=v_block, num_warps=plan.num_warps,
    )  # fmt: skip


def _in_chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    batch: StateBatch,
    scale: float,
    eps: float,
    out: torch.Tensor,
    plan: DeltaRulePlan,
    options: dict[str, int],
) -> None:
    (T, HV, DV), DK = v.shape, k.shape[2]
    half = all(x.dtype == k.dtype != torch.float32 for x in (q, k, v))
    kind, blocks = k.dtype if half else torch.float32, most_blocks(batch, T, CHUNK)
    of_keys, deltas = (k.new_empty(T, HV, D, dtype=kind) for D in (DK, DV))
    states = k.new_empty(blocks, HV, DK, DV, dtype=kind)
    logs = k.new_empty(2, HV, T, dtype=torch.float32)
    # The interpreter multiplies bf16 as integers: there, products are of float32.
    options |= {"SEQUENCES": sequences_of(batch, CHUNK), "HALF": half and not interpreted()}
    columns = triton.next_power_of_2(DV)
    v_block, out_block = min(plan.v_block, columns), min(plan.out_block, columns)
    # For Hopper, Triton 3.6 compiles narrower ones to wrong sums, or accesses beyond shared memory.
    wide = {"K_BLOCK": max(32, options["K_BLOCK"]), "V_BLOCK": max(64, columns)}
    sequences, sizes = (batch.starts, batch.lengths, batch.slots), (HV, batch.S, T)
    within_chunks[(blocks, HV)](
        k, v, g, beta, *sequences, of_keys, deltas, logs, eps, *k.stride()[:2], *v.stride()[:2],
        g.stride(0), beta.stride(0), *sizes, **(options | wide), num_warps=plan.num_warps,
    )  # fmt: skip
    scan_chunks[(triton.cdiv(DV, v_block), HV, batch.S)](
        k, of_keys, deltas, logs, state, states, *sequences, batch.past, *k.stride()[:2], *sizes,
        **options, V_BLOCK=v_block, num_warps=plan.scan_warps,
        num_stages=plan.num_stages if half else 1,
    )  # fmt: skip
    outputs_of_chunks[(blocks, HV, triton.cdiv(DV, out_block))](
        q, k, deltas, logs, states, *sequences, out, scale, eps, *q.stride()[:2], *k.stride()[:2],
        *sizes, **options, V_BLOCK=out_block, num_warps=plan.out_warps,
    )  # fmt: skip
