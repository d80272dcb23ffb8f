"""``dequant_gemm`` of experts: interpreted, and on the GPU that it is for.

The loop over K is that of linears, see gemm/test_register_gemms.py; here is what experts add.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pykernels import ref
from pykernels.errors import PykernelsError
from pykernels.gpu.common import launch
from pykernels.gpu.gemm import grouped, select
from pykernels.gpu.gemm.hopper import dequant
from pykernels.gpu.gemm.weights import pack_for_gpu
from pykernels.gpu.moe import fused_moe
from pykernels.gpu.plans.gemm import DequantPlan, GemmPlan
from pykernels.quant import get_format
from pykernels.shapes import SWIGLU, ExpertSpec, MoEShape
from pykernels.testing import balanced_routing, one_expert_routing, relative_error, skewed_routing

from ..gluon_shim import interpret
from .test_moe_ffn import GPT_OSS, random_experts

RAGGED = MoEShape(E=3, H=192, I=64, topk=2)  # half steps of inputs, ragged tiles of outputs
FOUR, EIGHT = DequantPlan(16, 4, 3, 2), DequantPlan(32, 8, 2, 3)


@pytest.fixture(autouse=True)
def warp_specialized(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel, or the interpreter's version in its place."""
    if not launch.interpreted():
        if launch.arch(device)[0] != 9:
            pytest.skip("no Hopper GPU")
        return
    interpret(monkeypatch, (dequant, "dequant_gemm"))
    for module in (grouped, select):
        monkeypatch.setattr(module, "supports_dequant", lambda *args: True)


CASES = [
    ("int4-g128", 10, skewed_routing, (FOUR, EIGHT), "experts of several blocks, of one, of none"),
    ("int4", 17, one_expert_routing, (EIGHT, EIGHT), "groups of 32, a full block and a row"),
    ("int8", 1, skewed_routing, (FOUR, FOUR), "one token, bytes"),
]
LAYERS = [
    *((*case, SWIGLU) for case in CASES),
    ("mxfp4", 10, skewed_routing, (FOUR, EIGHT), "biases, a clamp", GPT_OSS),
]


@pytest.mark.parametrize(
    ("name", "T", "route", "plans", "why", "spec"), LAYERS, ids=[c[4] for c in LAYERS]
)
def test_a_layer(
    name: str, T: int, route: Any, plans: Any, why: str, spec: ExpertSpec, device: Any
) -> None:
    experts = random_experts(replace(RAGGED, spec=spec), get_format(name), device)
    x, routing = torch.randn(T, RAGGED.H).bfloat16(), route(T, RAGGED)
    x *= 4 if spec.bias else 1  # the limit counts
    ids, weights = routing.ids.to(device), routing.weights.to(device)
    y = fused_moe.moe_ffn(x.to(device), ids, weights, experts, plans=plans)
    truth = ref.moe_ffn(x, routing.ids, routing.weights, experts, dtype=torch.float64)
    # The interpreter cuts where a GPU rounds.
    assert relative_error(y.cpu(), truth) < (1e-2 if launch.interpreted() else 6e-3)


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool((a - b).float().norm() <= 1e-2 * b.float().norm())  # the interpreter truncates


def test_one_scale_an_output(device: torch.device) -> None:
    fmt, shape = get_format("int8-channel"), replace(RAGGED, E=4)
    weights = [fmt.quantize(torch.randn(shape.I, shape.H)) for _ in range(8)]
    downs = [fmt.quantize(torch.randn(shape.H, shape.I)) for _ in range(4)]
    stacks = (pack_for_gpu(fmt, matrices).to(device) for matrices in (weights, downs))
    biases = (torch.randn(8, shape.I).to(device), torch.randn(4, shape.H).to(device))
    experts = fused_moe.GpuExperts(fmt, *stacks, GPT_OSS, *biases)
    assert experts.gate_up.group == shape.H
    ids = skewed_routing(8, shape).ids
    ids[3], ids[5, 1] = -1, shape.E
    order = fused_moe.sort_pairs(ids.to(device), shape.E)
    x = torch.randn(8, shape.H).bfloat16().to(device)
    out = torch.full((16, shape.I), float("nan"), dtype=torch.bfloat16, device=device)
    fused_moe.gate_up(x, experts, order, plan=FOUR, out=out)
    apart = fused_moe.gate_up(x, experts, order, plan=GemmPlan(16, 32, 64))
    starts = order.starts.tolist()
    assert out[: starts[4]].isfinite().all() and out[starts[4] :].isnan().all()
    assert _close(out[: starts[4]], apart[: starts[4]])


@pytest.mark.parametrize("name", ["q4_k", "q6_k"])
def test_k_quants_with_gate_and_up(name: str, device: torch.device) -> None:
    fmt = get_format(name)
    stack = pack_for_gpu(fmt, [fmt.quantize(torch.randn(24, 256)) for _ in range(4)]).to(device)
    x = torch.randn(3, 256).bfloat16().to(device)
    order = fused_moe.sort_pairs(torch.tensor([[0, 1], [1, 0], [1, 9]]).to(device), 2)
    out, apart = (x.new_full((6, 24), float("nan")) for _ in range(2))
    grouped.multiply(x, stack, out, FOUR, order=order, gated=True, gather=True)
    grouped.multiply(x, stack, apart, GemmPlan(16, 64, 64), order=order, gated=True, gather=True)
    assert _close(out[:5], apart[:5]) and out[5].isnan().all()


def test_what_it_does_not_take_is_refused(device: torch.device) -> None:
    experts = random_experts(RAGGED, get_format("int4"), device)
    x = torch.randn(3, RAGGED.H).bfloat16().to(device)
    order = fused_moe.sort_pairs(balanced_routing(3, RAGGED).ids.to(device), RAGGED.E)
    for more in ({"split_k": 2}, {"num_ctas": 264}):
        with pytest.raises(PykernelsError, match="one part"):
            fused_moe.gate_up(x, experts, order, plan=replace(FOUR, **more))
