"""The GPU's routed experts against float64, no further off than torch's own bfloat16 is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pykernels import ref
from pykernels.gpu.moe import fused_moe
from pykernels.gpu.plans.gemm import GemmPlan
from pykernels.quant import Biases, Format, get_format
from pykernels.ref.activation import swiglu
from pykernels.shapes import SWIGLU, ExpertSpec, MoEShape, Routing
from pykernels.testing import balanced_routing, one_expert_routing, relative_error, skewed_routing

SMALL = MoEShape(E=5, H=128, I=128, topk=2)
GPT_OSS = ExpertSpec(1.702, 7.0, 1.0, bias=True)
FORMATS = (
    "bf16",
    "fp8",
    "int8",
    "int8-channel",
    "int4",
    "int4-g128",
    "int4-channel",
    "mxfp4",
    "q4_k",
    "q6_k",
)


def random_experts(shape: MoEShape, fmt: Format, device: torch.device) -> fused_moe.GpuExperts:
    sizes = ((shape.I, shape.H), (shape.I, shape.H), (shape.H, shape.I))
    weights = [
        tuple(fmt.quantize(torch.randn(N, K) / K**0.5) for N, K in sizes) for _ in range(shape.E)
    ]
    biases = [Biases(*(torch.randn(N) for N, _ in sizes)) for _ in weights if shape.spec.bias]
    return fused_moe.GpuExperts.pack(fmt, weights, device, shape.spec, biases)


def native(x: torch.Tensor, routing: Routing, experts: fused_moe.GpuExperts) -> torch.Tensor:
    """What torch makes of it in bfloat16, from the weights dequantized to bfloat16."""
    y = torch.zeros(x.shape, dtype=torch.float32)
    for e in routing.ids.unique().tolist():
        gate, up, down = (experts.fmt.dequantize(w).bfloat16() for w in experts.unpack(e))
        tokens, ranks = torch.where(routing.ids == e)
        rows = x[tokens].bfloat16()
        gate, up, through = rows @ gate.T, rows @ up.T, down.T
        biases = experts.biases(e)
        if biases is None:
            out = (F.silu(gate) * up) @ through
        else:
            gate, up = gate + biases.gate.bfloat16(), up + biases.up.bfloat16()
            out = swiglu(gate, up, experts.spec) @ through + biases.down.bfloat16()
        y.index_add_(0, tokens, out.float() * routing.weights[tokens, ranks, None])
    return y.bfloat16()


def check(
    x: torch.Tensor,
    routing: Routing,
    experts: fused_moe.GpuExperts,
    device: torch.device,
    activations: str = "bf16",
    **how: Any,
) -> None:
    """Fails if the result is further from float64 than torch's own bfloat16, with some slack."""
    given = (x.to(device), routing.ids.to(device), routing.weights.to(device), experts)
    y = fused_moe.moe_ffn(*given, activations=activations, **how)
    args = (x, routing.ids, routing.weights, experts)
    truth = ref.moe_ffn(*args, dtype=torch.float64, activations=activations)
    exact = truth if activations == "bf16" else ref.moe_ffn(*args, dtype=torch.float64)
    # E4M3 inputs of the second product: a sum that rounds to another bfloat16 moves a whole code.
    slack = 1.3 if activations == "bf16" else 4
    theirs = relative_error(native(x, routing, experts), exact)
    assert relative_error(y.cpu(), truth) <= slack * theirs


@pytest.mark.parametrize("name", FORMATS)
def test_every_format(name: str, device: torch.device) -> None:
    K_quant = name.endswith("_k")
    shape = replace(SMALL, E=2, H=256, I=256) if K_quant else replace(SMALL, E=3)
    experts = random_experts(shape, get_format(name), device)
    x = torch.randn(4, shape.H).bfloat16()
    check(x, skewed_routing(4, shape), experts, device)


CASES = [
    ("one token", 1, skewed_routing),
    ("experts without tokens, others with several blocks", 19, skewed_routing),
    ("every token to the same experts", 17, one_expert_routing),
    ("blocks that are just full", 40, balanced_routing),
]


ROUTINGS = [
    (path, *case)
    for case in CASES
    for path in ("bf16", "int4", "fp8")
    if path == "bf16" or case[1] in (1, 19)
]
IDS = [f"{path}, {why}" for path, why, *_ in ROUTINGS]


@pytest.mark.parametrize(("path", "why", "T", "route"), ROUTINGS, ids=IDS)
def test_routings(path: str, why: str, T: int, route: Any, device: torch.device) -> None:
    experts = random_experts(SMALL, get_format(path), device)
    x = torch.randn(T, SMALL.H).bfloat16()
    activations = "fp8" if path == "fp8" else "bf16"
    check(x, route(T, SMALL), experts, device, activations)


PLANS = [
    ("bf16", "bf16", GemmPlan(16, 64, 64, group_m=1), "inputs no multiple of block_k: masked"),
    ("bf16", "bf16", GemmPlan(16, 64, 64, tma=True), "descriptors, ragged in every direction"),
    ("bf16", "bf16", GemmPlan(32, 128, 32, tma=True), "tiles wider than the matrix"),
    ("fp8", "fp8", GemmPlan(16, 32, 128, tma=True), "descriptors of E4M3"),
    ("bf16", "bf16", GemmPlan(16, 64, 64, tma=True, copy=True), "rows copied first"),
    ("fp8", "fp8", GemmPlan(16, 32, 128, tma=True, copy=True), "rows of E4M3 copied first"),
    ("fp8", "fp8", GemmPlan(16, 128, 128, group_m=2), "one scale block a tile"),
    ("fp8", "fp8", GemmPlan(16, 256, 128), "several scale blocks a tile"),
    ("int8", "bf16", GemmPlan(32, 64, 128), "several groups of 64 in a step"),
]


@pytest.mark.parametrize(("name", "activations", "plan", "why"), PLANS, ids=[p[3] for p in PLANS])
def test_plans(name: str, activations: str, plan: GemmPlan, why: str, device: torch.device) -> None:
    shape = MoEShape(E=3, H=192, I=160 if name == "bf16" else 192, topk=2)
    experts = random_experts(shape, get_format(name), device)
    x = torch.randn(21, shape.H).bfloat16()
    routing = skewed_routing(21, shape)
    check(x, routing, experts, device, activations, plans=(plan, plan))


UNPACK = GemmPlan(16, 128, 128, num_stages=2, unpack=True)
LIKE_GPT_OSS = [
    ("bf16", 1, "bf16", None),
    ("bf16", 19, "bf16", GemmPlan(16, 64, 64, tma=True)),
    ("mxfp4", 4, "bf16", None),
    ("fp8", 19, "fp8", None),
    ("q4_k", 4, "bf16", UNPACK),
]


@pytest.mark.parametrize(("name", "T", "activations", "plan"), LIKE_GPT_OSS, ids=str)
def test_biases_and_a_clamped_activation(
    name: str, T: int, activations: str, plan: GemmPlan | None, device: torch.device
) -> None:
    size = 256 if name == "q4_k" else 192
    shape = MoEShape(E=5, H=size, I=size, topk=2, spec=GPT_OSS)
    experts = random_experts(shape, get_format(name), device)
    x, routing = 4 * torch.randn(T, shape.H).bfloat16(), skewed_routing(T, shape)
    args = (x, routing.ids, routing.weights, experts)
    given = (*(part.to(device) for part in args[:3]), experts)
    plans = None if plan is None else (plan, plan)
    y = fused_moe.moe_ffn(*given, activations=activations, plans=plans).cpu()
    truth = ref.moe_ffn(*args, dtype=torch.float64, activations=activations)
    assert relative_error(y, truth) < (2e-2 if activations == "fp8" else 8e-3)  # flips of E4M3
    bare = replace(experts, spec=replace(GPT_OSS, limit=1e9))
    unclamped = ref.moe_ffn(*args[:3], bare, dtype=torch.float64, activations=activations)
    assert relative_error(unclamped, truth) > 0.1  # the limit counts


def test_ids_of_no_expert_contribute_nothing(device: torch.device) -> None:
    experts = random_experts(SMALL, get_format("bf16"), device)
    x, routing = torch.randn(6, SMALL.H).bfloat16(), balanced_routing(6, SMALL)
    ids = routing.ids.clone()
    ids[0], ids[3, 1] = -1, SMALL.E
    there = (ids >= 0) & (ids < SMALL.E)
    given = routing.weights.masked_fill(~there, torch.nan).to(device)  # padding may have any
    y = fused_moe.moe_ffn(x.to(device), ids.to(device), given, experts)
    weights = torch.where(there, routing.weights, 0.0)
    truth = ref.moe_ffn(x, ids.where(there, 0), weights, experts, dtype=torch.float64)
    assert relative_error(y.cpu(), truth) < 8e-3
    assert not y[0].any()


def test_no_tokens(device: torch.device) -> None:
    experts = random_experts(SMALL, get_format("bf16"), device)
    empty = torch.empty(0, SMALL.H, dtype=torch.bfloat16, device=device)
    routing = balanced_routing(0, SMALL)
    y = fused_moe.moe_ffn(empty, routing.ids.to(device), routing.weights.to(device), experts)
    assert y.shape == (0, SMALL.H)


BIG = MoEShape(E=8, H=1536, I=768, topk=2)
KINDS = [*((name, "bf16") for name in FORMATS), ("fp8", "fp8")]
SIZES = [
    *((*kind, rows) for kind in KINDS for rows in (4, 200)),
    *((*kind, rows) for kind in (KINDS[0], KINDS[-1]) for rows in (20, 80)),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "activations", "rows"), SIZES)
def test_every_plan_at_sizes_of_a_model(name: str, activations: str, rows: int, device) -> None:
    T = rows * BIG.E // BIG.topk
    x, experts = torch.randn(T, BIG.H).bfloat16(), random_experts(BIG, get_format(name), device)
    check(x, skewed_routing(T, BIG), experts, device, activations)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [0.25, 4, 20, 200])
@pytest.mark.parametrize(("name", "activations"), KINDS)
def test_every_plan_with_biases(name: str, activations: str, rows: float, device) -> None:
    shape, T = replace(BIG, spec=GPT_OSS), int(rows * BIG.E / BIG.topk)
    x, experts = torch.randn(T, shape.H).bfloat16(), random_experts(shape, get_format(name), device)
    check(x, skewed_routing(T, shape), experts, device, activations)


def _meta_call(
    name: str, rows: int, activations: str = "bf16", spec: ExpertSpec = SWIGLU
) -> tuple[str, object]:
    """(name, a launch for ``compiles.py``) of a small layer with DeepSeek-V3's sizes."""
    E, H, I, topk = 4, 7168, 2048, 2  # noqa: E741
    T, meta = rows * E // topk, torch.device("meta")

    def call() -> None:
        experts = fused_moe.GpuExperts.empty(get_format(name), E, H, I, meta, spec)
        x, weights = torch.empty(T, H, device=meta).bfloat16(), torch.empty(T, topk, device=meta)
        fused_moe.moe_ffn(x, weights.long(), weights, experts, activations=activations)

    return f"{name} {activations} {rows}{' biases' * spec.bias}", call


COMPILES = [
    *(
        _meta_call(name, rows)
        for name, rows in (
            ("bf16", 256),
            ("q4_k", 64),
            ("int4-g128", 1),
            ("q4_k", 1),
            ("fp8", 1),
            ("int4-g128", 256),
        )
    ),
    *(_meta_call("fp8", rows, "fp8") for rows in (64, 256)),
    *(
        _meta_call(name, rows, how, GPT_OSS)
        for name, rows, how in (
            ("bf16", 256, "bf16"),
            ("mxfp4", 1, "bf16"),
            ("mxfp4", 256, "bf16"),
            ("fp8", 20, "bf16"),
            ("fp8", 64, "fp8"),
        )
    ),
]
COMPILES_ON_A_GPU = [
    *(_meta_call("q6_k", rows) for rows in (1, 64)),
    *(_meta_call(name, rows) for name, rows in (("int4-g128", 64), ("int4", 256))),
]
