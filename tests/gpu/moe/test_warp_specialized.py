"""The experts' warp-specialized kernels of bf16 and E4M3: interpreted, and on Hopper.

What they share with the other plans test_moe_ffn.py tests, at the sizes they are chosen for.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import pykernels.gpu.common.launch as launch
from pykernels.errors import PykernelsError
from pykernels.gpu.gemm import grouped, select
from pykernels.gpu.gemm.hopper import bf16, fp8
from pykernels.gpu.moe import fused_moe
from pykernels.gpu.plans.gemm import GemmPlan
from pykernels.gpu.quantize import quantize_fp8
from pykernels.quant import get_format
from pykernels.shapes import MoEShape
from pykernels.testing import one_expert_routing, skewed_routing

from ..gluon_shim import interpret
from .test_moe_ffn import GPT_OSS, check, random_experts

PLAN = GemmPlan(128, 128, 128, 2, warp_specialized=True)
PLANS = (PLAN, PLAN)
RAGGED = MoEShape(E=4, H=320, I=192, topk=2)  # half groups of inputs, half tiles of outputs
FP8 = get_format("fp8")


@pytest.fixture(autouse=True)
def warp_specialized(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels, or the interpreter's versions in their places."""
    if not launch.interpreted():
        if launch.arch(device)[0] != 9:
            pytest.skip("no Hopper GPU")
        return
    for module in (grouped, select):
        monkeypatch.setattr(module, "supports_warp_specialized", lambda *args: True)
    interpret(monkeypatch, (bf16, "gemm_bf16_hopper"), (fp8, "gemm_fp8_hopper"))


CASES = [
    ("bf16", 70, skewed_routing, "experts of several blocks, of one, of none"),
    ("fp8", 80, skewed_routing, "experts of several blocks, of one, of none"),
    ("bf16", 130, one_expert_routing, "a full block and two rows"),
    ("fp8", 1, skewed_routing, "one token"),
]


@pytest.mark.parametrize(
    ("name", "T", "route", "why"), CASES, ids=[f"{case[0]}, {case[3]}" for case in CASES]
)
def test_a_layer(name: str, T: int, route: Any, why: str, device: torch.device) -> None:
    experts = random_experts(RAGGED, get_format(name), device)
    x = torch.randn(T, RAGGED.H).bfloat16()
    check(x, route(T, RAGGED), experts, device, name, plans=PLANS)


@pytest.mark.parametrize("name", ["bf16", "fp8"])
def test_more_tiles_than_programs(name: str, device: torch.device) -> None:
    """Programs walk: buffers and barriers go on from one tile to the next."""
    large = launch.arch(device)[0] == 9
    shape = MoEShape(E=4, H=1024 if large else 192, I=4096 if large else 256, topk=2)
    experts = random_experts(shape, get_format(name), device)
    x = torch.randn(3000 if large else 40, shape.H).bfloat16()
    check(x, skewed_routing(len(x), shape), experts, device, name, plans=PLANS)


def test_results_are_quantized_as_if_apart(device: torch.device) -> None:
    experts = random_experts(RAGGED, FP8, device)
    x = torch.randn(37, RAGGED.H).bfloat16().to(device)
    x[5] = 0  # a row of zeros has the scale 1
    order = fused_moe.sort_pairs(skewed_routing(37, RAGGED).ids.to(device), RAGGED.E)
    codes, scales = fused_moe.gate_up_quantized(x, experts, order, plan=PLAN)
    h = fused_moe.gate_up(x, experts, order, activations="fp8", plan=PLAN)
    expected, expected_scales = quantize_fp8(h)
    assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scales, expected_scales)
    assert (scales == 1).any(1).sum() == RAGGED.topk


def test_biases_are_refused(device: torch.device) -> None:
    experts = random_experts(replace(RAGGED, spec=GPT_OSS), FP8, device)
    x, routing = torch.randn(8, RAGGED.H).bfloat16().to(device), skewed_routing(8, RAGGED)
    given = (x, routing.ids.to(device), routing.weights.to(device), experts)
    with pytest.raises(PykernelsError, match="without biases"):
        fused_moe.moe_ffn(*given, activations="fp8", plans=PLANS)


@pytest.mark.parametrize("name", ["bf16", "fp8"])
def test_rows_of_no_expert(name: str, device: torch.device) -> None:
    experts = random_experts(RAGGED, get_format(name), device)
    ids = skewed_routing(40, RAGGED).ids
    ids[3], ids[9, 1] = -1, RAGGED.E
    order = fused_moe.sort_pairs(ids.to(device), RAGGED.E)
    x = torch.randn(40, RAGGED.H).bfloat16().to(device)
    out = torch.full((80, RAGGED.I), float("nan"), dtype=torch.bfloat16, device=device)
    fused_moe.gate_up(x, experts, order, activations=name, plan=PLAN, out=out)
    plan = GemmPlan(64, 64, 128)
    apart = fused_moe.gate_up(x, experts, order, activations=name, plan=plan)
    starts = order.starts.tolist()
    assert out[: starts[4]].isfinite().all() and out[starts[4] :].isnan().all()
    difference = (out - apart)[: starts[4]].float().norm()
    assert difference <= 1e-3 * apart[: starts[4]].float().norm()
