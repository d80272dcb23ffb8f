"""The routed experts of a layer at DeepSeek-V3's sizes: one token, and many for each expert."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from bench.harness.timing.case import Case, Entry
from pykernels.errors import PykernelsError
from pykernels.gpu.moe.fused_moe import GpuExperts, down, gate_up, gate_up_quantized, moe_ffn
from pykernels.gpu.moe.permute import sort_pairs
from pykernels.gpu.quantize import quantize_fp8
from pykernels.shapes import SortedPairs

from . import truth
from .weights import activations_for, random_experts

H, INTER, E, TOPK = 7168, 2048, 256, 8
_SERVED = 64
"""Experts of the formats that a GPU beside a CPU holds a few of."""
ROUTINGS = ("balanced", "zipf", "one")


def route(T: int, experts: int, topk: int, routing: str, device: torch.device) -> torch.Tensor:
    """int64 ids [T, topk]: as many tokens for each expert; rank r with weight 1 / (r + 1); the same
    experts for all."""
    if routing == "one":
        return torch.arange(topk, device=device).expand(T, topk).contiguous()
    if routing == "zipf":
        odds = 1 / torch.arange(1, experts + 1, device=device)
        return torch.multinomial(odds.expand(T, -1), topk)
    if routing != "balanced":
        raise PykernelsError(f"there is no routing {routing!r}", f"Use {', '.join(ROUTINGS)}")
    order = torch.randperm(experts, device=device)
    slots = torch.arange(T * topk, device=device) % experts
    return order[slots].view(T, topk)[torch.randperm(T, device=device)].contiguous()


def _peer(experts: GpuExperts, order: SortedPairs, weights: torch.Tensor) -> Callable[..., object]:
    """torch's grouped products with the sort done beforehand, which ours does every time."""
    gate_ups = experts.gate_up.data.view(experts.E, 2 * experts.I, experts.H).transpose(1, 2)
    downs, ends = experts.down.data.transpose(1, 2), order.starts[1:]
    tokens = order.pairs.long() // order.topk
    factors = weights.flatten()[order.pairs.long()][:, None].bfloat16()

    def run(x: torch.Tensor) -> torch.Tensor:
        gate, up = torch._grouped_mm(x[tokens], gate_ups, offs=ends).chunk(2, -1)
        y = torch._grouped_mm(F.silu(gate) * up, downs, offs=ends) * factors
        return torch.zeros_like(x).index_add_(0, tokens, y)

    return run


def layer_case(
    experts: GpuExperts, format: str, T: int, topk: int, routing: str, activations: str
) -> Case:
    """The whole layer: sort, gate and up, down, weighted sum."""
    device = experts.down.data.device
    x = torch.randn(T, experts.H, device=device).bfloat16()
    ids = route(T, experts.E, topk, routing, device)
    weights = torch.rand(T, topk, device=device)
    touched = int(ids.unique().numel())
    nbytes = touched * (2 * experts.gate_up.nbytes + experts.down.nbytes) + 4 * x.numel()
    peers: dict[str, Callable[[], object]] = {}
    if format == "bf16":
        order = sort_pairs(ids, experts.E)
        peers["torch_grouped_mm"] = functools.partial(_peer(experts, order, weights), x)
    run = functools.partial(moe_ffn, x, ids, weights, experts, activations=activations)
    return Case(
        "moe",
        "experts",
        _params(experts, format, T, topk, routing, activations),
        run,
        nbytes,
        6 * T * topk * experts.H * experts.I,
        peers,
        compute="fp8" if activations == "fp8" else "bf16",
        error=lambda: truth.experts_error(run(), x, ids, weights, experts, activations),
    )


def product_cases(
    experts: GpuExperts, format: str, T: int, topk: int, activations: str
) -> Iterator[Case]:
    """The two grouped products, each with all that makes its result: torch's gathers rows and
    applies SiLU too, "alone" it multiplies rows gathered before and does no more."""
    device = experts.down.data.device
    x = torch.randn(T, experts.H, device=device).bfloat16()
    order = sort_pairs(route(T, experts.E, topk, "balanced", device), experts.E)
    ends, S = order.starts[1:], T * topk
    params = _params(experts, format, T, topk, "balanced", activations)
    compute = "fp8" if activations == "fp8" else "bf16"
    peers: dict[str, Callable[[], object]] = {}
    if format == "bf16":
        peers = _gate_up_peers(x, experts, order)
    run: Callable[[], Any] = functools.partial(gate_up, x, experts, order)
    nbytes = 2 * len(experts.down) * experts.gate_up.nbytes + 2 * (x.numel() + S * experts.I)
    if activations == "fp8":
        run = functools.partial(gate_up_quantized, x, experts, order)
        nbytes -= S * experts.I - S * experts.I // 32  # codes and scales, not bf16
    flops = 4 * S * experts.H * experts.I
    error = functools.partial(truth.gate_up_error, run, x, experts, order, activations)
    yield Case("moe", "gate_up", params, run, nbytes, flops, peers, compute=compute, error=error)

    peers, scale, h = {}, None, torch.randn(S, experts.I, device=device).bfloat16()
    if format == "bf16":
        matrices = experts.down.data.transpose(1, 2)
        peers["torch_grouped_mm"] = functools.partial(torch._grouped_mm, h, matrices, offs=ends)
    nbytes = len(experts.down) * experts.down.nbytes + 2 * (h.numel() + S * experts.H)
    if activations == "fp8":
        h, scale = quantize_fp8(h)
        nbytes -= h.numel() - h.numel() // 32
    y = torch.empty(S, experts.H, dtype=torch.bfloat16, device=device)
    run = functools.partial(down, h, experts, order, activations=activations, out=y, h_scale=scale)
    error = functools.partial(truth.down_error, run, h, scale, experts, order)
    yield Case("moe", "down", params, run, nbytes, flops // 2, peers, compute=compute, error=error)
    if activations == "fp8":
        nbytes = 2 * x.numel() + S * experts.H + S * experts.H // 32
        run = functools.partial(quantize_fp8, x, order)
        error = functools.partial(truth.quantize_error, run, x, order)
        yield Case("moe", "quantize_fp8 sorted", params, run, nbytes, 0, error=error)


def _gate_up_peers(
    x: torch.Tensor, experts: GpuExperts, order: SortedPairs
) -> dict[str, Callable[[], object]]:
    matrices = experts.gate_up.data.view(experts.E, 2 * experts.I, experts.H).transpose(1, 2)
    tokens, ends = order.pairs.long() // order.topk, order.starts[1:]

    def whole() -> torch.Tensor:
        gate, up = torch._grouped_mm(x[tokens], matrices, offs=ends).chunk(2, -1)
        return F.silu(gate) * up

    alone = functools.partial(torch._grouped_mm, x[tokens], matrices, offs=ends)
    return {"torch_grouped_mm": whole, "torch_grouped_mm_alone": alone}


def _params(
    experts: GpuExperts, format: str, T: int, topk: int, routing: str, activations: str
) -> dict[str, int | str]:
    return {
        "format": format,
        "activations": activations,
        "tokens": T,
        "hidden": experts.H,
        "inter": experts.I,
        "experts": experts.E,
        "topk": topk,
        "routing": routing,
        "rows_per_expert": T * topk // experts.E,
    }


def cases(device: torch.device, quick: bool = False) -> Iterator[Case]:
    """The table's rows."""
    return (entry.case(device) for entry in table(quick))


def table(quick: bool = False) -> Iterator[Entry]:
    """bf16 and fp8 at 64 to 512 rows an expert; the others at one token, and with many."""
    for format in ("bf16", "fp8"):
        for each in (128, 512) if quick else (64, 128, 256, 512):
            T = each * E // TOPK
            yield _layer(format, E, T)
            if each in (128, 512):
                yield from _products(format, T)
        if not quick:
            yield _layer(format, E, 256 * E // TOPK, "zipf")
        yield _layer(format, E, 1)
    served = {"int4-g128": (1, 8, 512, 2048), "int8": (1, 2048), "q4_k": (1, 512, 2048)}
    few = {"int4-g128": (1, 512)}
    for format, tokens in (few if quick else {**served, "q6_k": (1, 2048)}).items():
        for T in tokens:
            yield _layer(format, _SERVED, T)


def _layer(format: str, experts: int, T: int, routing: str = "balanced") -> Entry:
    name = f"experts-{format}-T{T}" + (f"-{routing}" if routing != "balanced" else "")
    make = functools.partial(case, format=format, tokens=T, experts=experts, routing=routing)
    return Entry("moe", name, make)


def _products(format: str, T: int) -> Iterator[Entry]:
    how = activations_for(format, T * TOPK / E, "auto")

    def make(part: str, device: torch.device) -> Case:
        experts = random_experts(format, E, H, INTER, device)
        parts = product_cases(experts, format, T, TOPK, how)
        return next(case for case in parts if case.name == part)

    for part in ("gate_up", "down", *(["quantize_fp8 sorted"] if how == "fp8" else [])):
        name = f"{part.replace(' ', '-')}-{format}-T{T}"
        yield Entry("moe", name, functools.partial(make, part))


def case(
    device: torch.device,
    format: str = "bf16",
    tokens: int = 1,
    hidden: int = H,
    inter: int = INTER,
    experts: int = E,
    topk: int = TOPK,
    routing: str = "balanced",
    activations: str = "auto",
) -> Case:
    """One layer, from the flags of ``pykernels bench moe --device cuda:0``."""
    if topk > experts:
        raise PykernelsError(
            f"top-{topk} of {experts} experts", "Use a topk of at most the experts"
        )
    how = activations_for(format, tokens * topk / experts, activations)
    layer = random_experts(format, experts, hidden, inter, device)
    return layer_case(layer, format, tokens, topk, routing, how)
