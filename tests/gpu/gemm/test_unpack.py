"""K-quants unpacked to bfloat16 before their products, a part of them at a time."""

from __future__ import annotations

import pytest
import torch

from pykernels.errors import PykernelsError
from pykernels.gpu.common import launch
from pykernels.gpu.gemm import grouped, unpack
from pykernels.gpu.gemm.grouped import multiply
from pykernels.gpu.gemm.linear import linear
from pykernels.gpu.moe import fused_moe
from pykernels.gpu.plans.gemm import GemmPlan
from pykernels.quant import get_format
from pykernels.shapes import MoEShape
from pykernels.testing import relative_error, skewed_routing

from ..moe.test_moe_ffn import random_experts
from .test_linear import made

PLAN = GemmPlan(16, 256, 128, num_stages=2, unpack=True)
APART = GemmPlan(16, 128, 64)
SHAPE = MoEShape(E=3, H=256, I=256, topk=2)


def near(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The same products, added in another order; the interpreter cuts to bfloat16."""
    return relative_error(a.cpu(), b.double().cpu()) < 6e-3


@pytest.fixture(autouse=True)
def _fewer_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    if launch.interpreted():
        monkeypatch.setattr(unpack, "_ROWS", 128)


def test_rows_of_a_matrix_by_and_by(device: torch.device) -> None:
    stack = made("q4_k", 300, 256)[1].to(device)
    x, bias = torch.randn(3, 256).bfloat16().to(device), torch.randn(300, device=device)
    out = torch.full((3, 300), float("nan"), dtype=torch.bfloat16, device=device)
    grouped.multiply_unpacked(x, stack, out, PLAN, None, False, False, bias, limit=1)
    assert near(out, linear(x, stack, bias, plan=APART))


def test_experts_one_by_one(device: torch.device) -> None:
    experts = random_experts(SHAPE, get_format("q4_k"), device)
    ids = skewed_routing(6, SHAPE).ids
    ids[3], ids[5, 1] = -1, SHAPE.E
    order = fused_moe.sort_pairs(ids.to(device), SHAPE.E)
    x = torch.randn(6, SHAPE.H).bfloat16().to(device)
    apart = fused_moe.gate_up(x, experts, order, plan=APART)
    end = int(order.starts[-1])
    for limit in (1, *[1 << 30] * (device.type == "cuda")):
        out = torch.full((12, SHAPE.I), float("nan"), dtype=torch.bfloat16, device=device)
        given = (x, experts.gate_up, out, PLAN, order, True, True, None)
        grouped.multiply_unpacked(*given, limit=limit)
        assert near(out[:end], apart[:end]) and out[end:].isnan().all()


def test_bfloat16_is_not_unpacked(device: torch.device) -> None:
    stack = made("bf16", 72, 64)[1].to(device)
    x = torch.zeros(1, 64, dtype=torch.bfloat16, device=device)
    with pytest.raises(PykernelsError, match="unpacks what is not packed"):
        multiply(x, stack, x.new_empty(1, 72), PLAN)
