"""How far a case's call is from ``pykernels.ref`` on the same inputs: its relative error.

Of a call of many rows only some are compared, all over it: the reference is float32 and unhurried.
Weights are unpacked to the checkpoint's format and dequantized on the CPU, as ``ref`` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from pykernels import ref
from pykernels.gpu.gemm.weights import Matrices, unpack_from_gpu
from pykernels.gpu.moe.fused_moe import GpuExperts
from pykernels.quant import Format, Weight, get_format
from pykernels.ref.activation import swiglu
from pykernels.ref.linear import dequantize_fp8
from pykernels.shapes import Ragged, RouterSpec, Routing, SortedPairs
from pykernels.testing import relative_error

ROWS, SLOTS, QUERIES = 4, 4, 64
"""Compared at most: rows of a linear, slots of a grouped product, a prompt's last queries."""
TOKENS = 2
"""Tokens of a layer of experts that are compared: each of their experts is unpacked."""

MOST = 0.03
"""Relative error of a call that is right: less than 1 % where results are bf16; where they are
E4M3, a sum that is a little off may round to the next code."""


def some(count: int, most: int) -> slice:
    """At most ``most`` of so many rows, equally far apart."""
    return slice(None, None, max(1, -(-count // most)))


def linear_error(
    result: torch.Tensor, x: torch.Tensor, stack: Matrices, format: str, activations: str
) -> float:
    fmt, rows = get_format(format), some(len(x), ROWS)
    weight = unpack_from_gpu(fmt, stack, 0)
    truth = ref.linear(x[rows].cpu(), weight, fmt=fmt, activations=activations)
    return relative_error(result[rows].cpu(), truth)


@dataclass(frozen=True)
class OnGpu:
    """A GPU's experts as ``ref.moe_ffn`` reads packed ones."""

    layer: GpuExperts

    @property
    def fmt(self) -> Format:
        return self.layer.fmt

    down_fmt = fmt

    @property
    def spec(self) -> Any:
        return self.layer.spec

    def holds(self, expert: int) -> bool:
        return 0 <= expert < self.layer.E

    def biases(self, expert: int) -> None:
        """Random experts have none."""

    def unpack(self, expert: int) -> tuple[Weight, Weight, Weight]:
        """Gate, up and down."""
        gate_up, down, fmt = self.layer.gate_up, self.layer.down, self.layer.fmt
        gate, up = (unpack_from_gpu(fmt, gate_up, 2 * expert + i) for i in range(2))
        return gate, up, unpack_from_gpu(fmt, down, expert)


def experts_error(
    result: torch.Tensor,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    experts: GpuExperts,
    activations: str,
) -> float:
    rows = some(len(x), TOKENS)
    x, ids, weights = (part[rows].cpu() for part in (x, ids, weights))
    packed: Any = OnGpu(experts)
    truth = ref.moe_ffn(x, ids, weights, packed, activations=activations)
    return relative_error(result[rows].cpu(), truth)


def _slots(order: SortedPairs) -> tuple[torch.Tensor, Sequence[int], Sequence[int]]:
    """Some of the sorted slots, the token and the expert of each."""
    slots = torch.arange(len(order.pairs))[some(len(order.pairs), SLOTS)].contiguous()
    tokens = order.pairs.cpu().long()[slots] // order.topk
    experts = torch.searchsorted(order.starts.cpu().long(), slots, right=True) - 1
    return slots, tokens.tolist(), experts.tolist()


def gate_up_error(
    run: Callable[[], Any],
    x: torch.Tensor,
    experts: GpuExperts,
    order: SortedPairs,
    activations: str,
) -> float:
    """Error of gate-up. With "fp8" activations both sides are quantized, and what codes and scales
    stand for is compared."""
    result, layer, rows = run(), OnGpu(experts), []
    quantized = isinstance(result, tuple)
    result = dequantize_fp8(*result) if quantized else result
    slots, tokens, of = _slots(order)
    for token, expert in zip(tokens, of, strict=True):
        row, matrices = x[token : token + 1].cpu(), layer.unpack(expert)[:2]
        how: dict[str, Any] = {"fmt": layer.fmt, "activations": activations}
        gate, up = (ref.linear(row, weight, **how) for weight in matrices)
        rows.append(swiglu(gate, up, layer.spec))
    truth = torch.cat(rows)
    truth = dequantize_fp8(*ref.quantize_fp8(truth)) if quantized else truth
    return relative_error(result[slots.to(result.device)].cpu(), truth)


def down_error(
    run: Callable[[], Any],
    h: torch.Tensor,
    scale: torch.Tensor | None,
    experts: GpuExperts,
    order: SortedPairs,
) -> float:
    """``h`` as it is multiplied: with ``scale``, codes."""
    result, layer, rows = run(), OnGpu(experts), []
    h = h if scale is None else dequantize_fp8(h, scale)
    slots, _, of = _slots(order)
    for slot, expert in zip(slots.tolist(), of, strict=True):
        weight = layer.unpack(expert)[2]
        rows.append(ref.linear(h[slot : slot + 1].cpu(), weight, fmt=layer.fmt))
    return relative_error(result[slots.to(result.device)].cpu(), torch.cat(rows))


def quantize_error(run: Callable[[], Any], x: torch.Tensor, order: SortedPairs) -> float:
    return relative_error(dequantize_fp8(*run()), dequantize_fp8(*ref.quantize_fp8(x, order)))


def decode_error(
    result: torch.Tensor, given: Sequence[Any], scale: float, window: int | None
) -> float:
    """Returns the error of all queries.

    Args:
        given: queries, pages, table, lengths, the pages' scales, ``out``.
    """
    *tensors, (first, second), _ = given
    if len(tensors) == 6:  # MLA: queries and pages are two parts each
        return relative_error(result, ref.mla_decode(*tensors, scale=scale, latent_scale=first))
    scales = {"k_scale": first, "v_scale": second}
    return relative_error(result, ref.gqa_decode(*tensors, scale=scale, window=window, **scales))


def prefill_error(
    result: torch.Tensor,
    given: Sequence[torch.Tensor],
    batch: Ragged,
    scale: float,
    **options: Any,
) -> float:
    """Returns the error of each sequence's last queries.

    Args:
        given: queries, keys and values, of MLA in parts.
    """
    n = min(QUERIES, batch.max_queries)
    starts = batch.q_starts + (batch.q_lengths - n)
    last = replace(batch, q_starts=starts, q_lengths=torch.full_like(starts, n), max_queries=n)
    op: Any = ref.mla_prefill if len(given) == 5 else ref.gqa_prefill
    truth = op(*given, last, scale=scale, **options)
    rows = torch.cat([torch.arange(s, s + n, device=result.device) for s in starts.tolist()])
    return relative_error(result[rows], truth[rows])


def router_error(
    routing: Routing, logits: torch.Tensor, spec: RouterSpec, bias: torch.Tensor | None
) -> float:
    """Returns the error of the weights at the chosen experts, in whatever order."""

    def spread(one: Routing) -> torch.Tensor:
        ids, weights = one.ids.long(), one.weights.float()
        return torch.zeros_like(logits).scatter_(1, ids, weights)

    return relative_error(spread(routing), spread(ref.router(logits, spec, bias)))


def sort_error(order: SortedPairs, ids: torch.Tensor, E: int) -> float:
    """0, or it is wrong."""
    truth = ref.sort_pairs(ids, E)
    pairs = (order.pairs, truth.pairs), (order.starts, truth.starts)
    both = (*pairs, (order.positions, truth.positions))
    return max(relative_error(ours.view(-1), theirs.view(-1)) for ours, theirs in both)


def route_error(
    result: tuple[Routing, SortedPairs, torch.Tensor | None],
    logits: torch.Tensor,
    spec: RouterSpec,
    bias: torch.Tensor | None,
    x: torch.Tensor | None,
) -> float:
    """The largest of the choice's, the sort's and the gathered rows'."""
    routing, order, gathered = result
    errors = [router_error(routing, logits, spec, bias)]
    errors.append(sort_error(order, routing.ids, logits.shape[1]))
    if x is not None and gathered is not None:
        errors.append(relative_error(gathered, ref.permute(x, order)))
    return max(errors)
