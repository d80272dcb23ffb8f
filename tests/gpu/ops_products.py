"""The matrix products of ``ops.py``: routed experts and quantized linears, every kind of weight."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from pykernels.gpu.gemm.linear import linear
from pykernels.gpu.gemm.weights import Matrices, empty_for_gpu
from pykernels.gpu.moe import fused_moe
from pykernels.gpu.plans.gemm import GemmPlan
from pykernels.quant import Format, get_format
from pykernels.shapes import SWIGLU, ExpertSpec

from .ops import Op, Tensors, choices, empty, large, normal

UNPACK = GemmPlan(64, 128, 64, num_stages=2, unpack=True)
FORMATS = ("bf16", "fp8", "int8", "int4", "int4-g128", "q4_k", "q6_k")


def _stack(name: str, fmt: Format, count: int, N: int, K: int, device: torch.device) -> Tensors:
    """Random tensors for a stack of matrices."""
    stack = empty_for_gpu(fmt, count, N, K, device)
    data, scale = stack.data, stack.scale
    if stack.kind in ("bf16", "fp8"):
        data = normal(device, *data.shape, dtype=data.dtype)
    else:  # any byte is a code; K-quants' scales are bytes among them, kept from Inf and NaN
        data = torch.randint(0, 40, data.shape, device=device).to(data.dtype)
    found = {f"{name} data": data}
    if scale is not None:
        found[f"{name} scale"] = (torch.rand(scale.shape, device=device) / K).to(scale.dtype)
    return found


def _filled(stack: Matrices, name: str, given: Tensors) -> Matrices:
    return replace(stack, data=given[f"{name} data"], scale=given.get(f"{name} scale"))


def _experts(
    name: str,
    T: int,
    activations: str = "bf16",
    table: bool = False,
    unpack: bool = False,
    spec: ExpertSpec = SWIGLU,
) -> Op:
    """A layer of 5 experts, or of 3 slots that a table deals out; the GPU's own plans, or one that
    unpacks them beforehand."""
    fmt, E, topk = get_format(name), 5, 2
    count = 3 if table else E

    def sizes(device: torch.device) -> tuple[int, int]:
        H = large(device, 1536, 256 if name.endswith("_k") else 128)
        return H, large(device, 768, 256 if name.endswith("_k") else 192)

    def make(device: torch.device) -> Tensors:
        (H, inter), n = sizes(device), large(device, T, min(T, 4))
        given = {name: normal(device, n, H) for name in ("x", "add")}
        given |= {"ids": choices(device, n, topk, E), "out": empty(device, n, H)}
        given["weights"] = torch.rand(n, topk, device=device)
        if table:
            slots = torch.tensor([0, 1, 2, -1, -1], device=device, dtype=torch.int32)
            given["table"] = slots[torch.randperm(E, device=device)]
        for part, mats, N, K in (("gate_up", 2 * count, inter, H), ("down", count, H, inter)):
            given |= _stack(part, fmt, mats, N, K, device)
            if spec.bias:
                given[f"{part}_bias"] = normal(device, mats, N, dtype=torch.float32)
        return given

    def run(t: Tensors) -> torch.Tensor:
        H, inter = sizes(t["x"].device)
        layer = fused_moe.Experts.empty(fmt, count, H, inter, torch.device("meta"), spec)
        parts: dict[str, Any] = {
            name: _filled(getattr(layer, name), name, t) for name in ("gate_up", "down")
        }
        parts |= {name: x for name, x in t.items() if name.endswith("_bias")}
        experts = replace(layer, **parts, slots=t.get("table"))
        given = (t["x"], t["ids"], t["weights"], experts)
        how = {"activations": activations, "plans": (UNPACK, UNPACK) if unpack else None}
        return fused_moe.moe_ffn(*given, **how, add=t["add"], out=t["out"])

    which = (*["slot table"] * table, *["unpacked"] * unpack, *["biases"] * spec.bias)
    words = ("experts", name, f"{T} tokens", activations, *which)
    return Op(" ".join(words), make, run)


def _linear(name: str, M: int, activations: str = "bf16", size: Any = (1544, 2048)) -> Op:
    """A matrix of this ``size`` on a GPU."""
    fmt = get_format(name)

    def sizes(device: torch.device) -> tuple[int, int]:
        return large(device, size[0], 72), large(device, size[1], 256)

    def make(device: torch.device) -> Tensors:
        N, K = sizes(device)
        given = {"x": normal(device, M, K), "bias": normal(device, N), "out": empty(device, M, N)}
        return given | _stack("w", fmt, 1, N, K, device)

    def run(t: Tensors) -> torch.Tensor:
        stack = empty_for_gpu(fmt, 1, *sizes(t["x"].device), torch.device("meta"))
        weight = _filled(stack, "w", t)
        return linear(t["x"], weight, t["bias"], activations=activations, out=t["out"])

    words = ("linear", name, f"{M} rows", activations, *[str(size)] * (size != (1544, 2048)))
    return Op(" ".join(words), make, run)


_KINDS = [*((name, "bf16") for name in FORMATS), ("fp8", "fp8")]
PRODUCTS = (
    *(_experts(name, T, how) for name, how in _KINDS for T in (1, 170)),
    *(_experts(name, T, table=True) for name, T in (("int4", 20), ("bf16", 20), ("bf16", 500))),
    _experts("bf16", 2, table=True, spec=ExpertSpec(1.702, 7.0, 1.0, bias=True)),
    _experts("fp8", 300, "fp8", table=True),
    _experts("q4_k", 20, table=True, unpack=True),
    *(_linear(name, M, how) for name, how in _KINDS for M in (1, 3, 16, 300)),
    *(_linear(name, 1600) for name in ("fp8", "q4_k", "q6_k")),  # unpacked
    _linear("int4", 40, size=(4104, 3200)),  # stream-K over all tiles,
    _linear("int4", 300, size=(8520, 512)),  # or over the last wave
    _linear("fp8", 300, "fp8", size=(264, 4480)),  # warp-specialized, its tiles shared
)
