"""The GPU's routed experts against float64, no further off than torch's own bfloat16 is."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pykernels import ref
from pykernels.gpu import moe
from pykernels.gpu.plan import GemmPlan
from pykernels.quant import Format, get_format
from pykernels.quant.integer import Integer
from pykernels.shapes import MoEShape, Routing
from pykernels.testing import balanced_routing, one_expert_routing, relative_error, skewed_routing


def random_experts(shape: MoEShape, fmt: Format, device: torch.device) -> moe.Experts:
    sizes = ((shape.I, shape.H), (shape.I, shape.H), (shape.H, shape.I))
    weights = [
        tuple(fmt.quantize(torch.randn(N, K) / K**0.5) for N, K in sizes) for _ in range(shape.E)
    ]
    return moe.Experts.pack(fmt, weights, device)


def native(x: torch.Tensor, routing: Routing, experts: moe.Experts) -> torch.Tensor:
    """What torch makes of it in bfloat16, from the weights dequantized to bfloat16."""
    y = torch.zeros(x.shape, dtype=torch.float32)
    for e in routing.ids.unique().tolist():
        gate, up, down = (experts.fmt.dequantize(w).bfloat16() for w in experts.unpack(e))
        tokens, ranks = torch.where(routing.ids == e)
        rows = x[tokens].bfloat16()
        h = F.silu(rows @ gate.T) * (rows @ up.T)
        y.index_add_(0, tokens, (h @ down.T).float() * routing.weights[tokens, ranks, None])
    return y.bfloat16()


def check(
    x: torch.Tensor, routing: Routing, experts: moe.Experts, device: torch.device, **how: object
) -> torch.Tensor:
    activations = str(how.get("activations", "bf16"))
    weights = routing.weights.to(device)
    y = moe.moe_ffn(x.to(device), routing.ids.to(device), weights, experts, **how)  # type: ignore[arg-type]
    truth = ref.moe_ffn(
        x, routing.ids, routing.weights, experts, dtype=torch.float64, activations=activations
    )
    slack = 1.5
    if activations == "fp8":  # h is quantized: a sum that rounds otherwise moves a code
        slack = 8
    bound = slack * relative_error(native(x, routing, experts), ref.moe_ffn(
        x, routing.ids, routing.weights, experts, dtype=torch.float64
    ))  # fmt: skip
    assert relative_error(y.cpu(), truth) <= bound
    return y


FORMATS = ("bf16", "fp8", "int8", "int4", "int4-g128", "q4_k", "q6_k")


@pytest.mark.parametrize("name", FORMATS)
def test_formats(name: str, device: torch.device) -> None:
    fmt = get_format(name)
    size = 256 if name.endswith("_k") else 128
    shape = MoEShape(E=5, H=size, I=size, topk=2)
    experts = random_experts(shape, fmt, device)
    x = torch.randn(7, shape.H).bfloat16()
    check(x, skewed_routing(7, shape), experts, device)
