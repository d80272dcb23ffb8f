"""The matrix products of ``ops.py``: routed experts and quantized linears, every kind of weight."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from pykernels.gpu.gemm.linear import linear
from pykernels.gpu.gemm.weights import Matrices, empty_for_gpu
from pykernels.gpu.moe import fused_moe
from pykernels.gpu.moe.from_tiles import ExpertTiles, section_bytes, unpack_tiles
from pykernels.gpu.plans.gemm import GemmPlan
from pykernels.quant import Format, get_format
from pykernels.shapes import SWIGLU, ExpertSpec, MoEShape

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
    unpack: bool = False,
    spec: ExpertSpec = SWIGLU,
) -> Op:
    """A layer of 5 experts; the GPU's own plans, or one that unpacks them beforehand."""
    fmt, E, topk = get_format(name), 5, 2

    def sizes(device: torch.device) -> tuple[int, int]:
        H = large(device, 1536, 256 if name.endswith("_k") else 128)
        return H, large(device, 768, 256 if name.endswith("_k") else 192)

    def make(device: torch.device) -> Tensors:
        (H, inter), n = sizes(device), large(device, T, min(T, 4))
        given = {name: normal(device, n, H) for name in ("x", "add")}
        given |= {"ids": choices(device, n, topk, E), "out": empty(device, n, H)}
        given["weights"] = torch.rand(n, topk, device=device)
        for part, mats, N, K in (("gate_up", 2 * E, inter, H), ("down", E, H, inter)):
            given |= _stack(part, fmt, mats, N, K, device)
            if spec.bias:
                given[f"{part}_bias"] = normal(device, mats, N, dtype=torch.float32)
        return given

    def run(t: Tensors) -> torch.Tensor:
        H, inter = sizes(t["x"].device)
        layer = fused_moe.GpuExperts.empty(fmt, E, H, inter, torch.device("meta"), spec)
        parts: dict[str, Any] = {
            name: _filled(getattr(layer, name), name, t) for name in ("gate_up", "down")
        }
        parts |= {name: x for name, x in t.items() if name.endswith("_bias")}
        experts = replace(layer, **parts)
        given = (t["x"], t["ids"], t["weights"], experts)
        how = {"activations": activations, "plans": (UNPACK, UNPACK) if unpack else None}
        return fused_moe.moe_ffn(*given, **how, add=t["add"], out=t["out"])

    which = (*["unpacked"] * unpack, *["biases"] * spec.bias)
    words = ("experts", name, f"{T} tokens", activations, *which)
    return Op(" ".join(words), make, run)


def _unpack_tiles(name: str, to: str, spec: ExpertSpec = SWIGLU) -> Op:
    """Three staged experts to three of five slots, or nowhere."""
    fmt, out_fmt, staged, count = get_format(name), get_format(to), 3, 5
    parts = ("codes", "scales", "down codes", "down scales", "biases", "down biases")

    def shape_on(device: torch.device) -> MoEShape:
        small = (256, 256) if name.endswith("_k") else (128, 64)
        return MoEShape(
            staged, large(device, 1536, small[0]), large(device, 768, small[1]), 2, spec
        )

    def make(device: torch.device) -> Tensors:
        shape = shape_on(device)
        sizes = zip(parts, section_bytes(shape, fmt, fmt), strict=True)
        given = {
            f"tiles' {part}": torch.randint(60, (staged, size), device=device).to(torch.uint8)
            for part, size in sizes
        }
        given["slots"] = torch.randperm(count, device=device)[:staged].to(torch.int32) - 1
        for part, mats, N, K in (("gate_up", 2, shape.I, shape.H), ("down", 1, shape.H, shape.I)):
            stack = empty_for_gpu(out_fmt, mats * count, N, K, torch.device("meta"))
            for kind, x in (("data", stack.data), ("scale", stack.scale)):
                if x is not None:
                    given[f"{part} {kind}"] = empty(device, *x.shape, dtype=x.dtype)
            if spec.bias:
                given[f"{part}_bias"] = empty(device, mats * count, N, dtype=torch.float32)
        return given

    def run(t: Tensors) -> None:
        shape = shape_on(t["slots"].device)
        tiles = ExpertTiles(shape, fmt, fmt, tuple(t[f"tiles' {part}"] for part in parts))
        slots = fused_moe.GpuExperts.empty(
            out_fmt, count, shape.H, shape.I, torch.device("meta"), spec
        )
        filled: dict[str, Any] = {
            part: _filled(getattr(slots, part), part, t) for part in ("gate_up", "down")
        }
        filled |= {part: x for part, x in t.items() if part.endswith("_bias")}
        unpack_tiles(tiles, replace(slots, **filled), t["slots"])

    scales = ("gate_up scale", "down scale") * (to not in ("bf16", "q4_k", "q6_k"))
    biases = ("gate_up_bias", "down_bias") * spec.bias
    written = ("gate_up data", "down data", *scales, *biases)
    return Op(f"unpack_tiles {name} to {to}", make, run, written)


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
    *(_experts(name, T) for name, T in (("int4", 20), ("bf16", 20), ("bf16", 500))),
    _experts("bf16", 2, spec=ExpertSpec(1.702, 7.0, 1.0, bias=True)),
    _experts("fp8", 300, "fp8"),
    _experts("q4_k", 20, unpack=True),
    *(_linear(name, M, how) for name, how in _KINDS for M in (1, 3, 16, 300)),
    *(_linear(name, 1600) for name in ("fp8", "q4_k", "q6_k")),  # unpacked
    _linear("int4", 40, size=(4104, 3200)),  # stream-K over all tiles,
    _linear("int4", 300, size=(8520, 512)),  # or over the last wave
    _linear("fp8", 300, "fp8", size=(264, 4480)),  # warp-specialized, its tiles shared
    _unpack_tiles("mxfp4", "mxfp4", ExpertSpec(1.702, 7.0, 1.0, bias=True)),
    *(_unpack_tiles(name, name) for name in ("bf16", "fp8", "int8", "q4_k", "q6_k")),
    *(_unpack_tiles(name, "bf16") for name in ("int4-zp", "fp8", "q5_k", "q6_k")),
)
