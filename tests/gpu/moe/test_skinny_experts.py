"""``skinny_experts``: compiled on a GPU, on any CPU by the Gluon interpreter."""

from __future__ import annotations

import pytest
import torch

from pykernels import ref
from pykernels.errors import PykernelsError
from pykernels.gpu.common import launch
from pykernels.gpu.gemm import grouped
from pykernels.gpu.gemm.skinny import experts
from pykernels.gpu.gemm.weights import pack_for_gpu
from pykernels.gpu.moe.permute import sort_pairs
from pykernels.gpu.plans.gemm import SkinnyExpertsPlan
from pykernels.quant import get_format
from pykernels.quant.integer import Integer
from pykernels.ref.activation import swiglu
from pykernels.shapes import SWIGLU, ExpertSpec
from pykernels.testing import relative_error

from ..gemm.test_linear import made
from ..gluon_shim import interpret
from .test_moe_ffn import GPT_OSS


@pytest.fixture
def device(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    if launch.interpreted():
        interpret(monkeypatch, (experts, "skinny_experts"))
        monkeypatch.setattr(grouped, "arch", lambda device: (8, 0))
    return device


CASES = [
    ("q4_k", 512, 24, SkinnyExpertsPlan(32, 1), "more steps than one"),
    ("q6_k", 256, 40, SkinnyExpertsPlan(32, 2, 4, ahead=2), "rows that do not exist, 16 columns"),
    ("int4", 320, 24, SkinnyExpertsPlan(32, 1, 2), "half a chunk at the end"),
    ("int4-g128", 320, 24, SkinnyExpertsPlan(32, 2, 8, 2), "half a group at the end"),
    ("int8", 192, 40, SkinnyExpertsPlan(32, 2, 8, ahead=2), "bytes"),
    ("fp8", 192, 136, SkinnyExpertsPlan(128, 2, 8), "two blocks of scales"),
]
PRODUCTS = [
    *((*case, SWIGLU) for case in CASES),
    ("int4-g128", 320, 40, SkinnyExpertsPlan(32, 2, 8, 2), "biases, a clamp", GPT_OSS),
    ("mxfp4", 320, 40, SkinnyExpertsPlan(32, 1, 2), "biases, a clamp, scales apart", GPT_OSS),
]
IDS = torch.tensor([[1, 3], [3, 7], [1, 3], [2, -1]])


@pytest.mark.parametrize(
    ("name", "K", "N", "plan", "why", "spec"), PRODUCTS, ids=[c[4] for c in PRODUCTS]
)
def test_products(
    name: str,
    K: int,
    N: int,
    plan: SkinnyExpertsPlan,
    why: str,
    spec: ExpertSpec,
    device: torch.device,
) -> None:
    """Experts without rows, with more than a program takes; ids of none."""
    (T, topk), E = IDS.shape, 4
    fmt = get_format(name)
    packed = [fmt.quantize(4 * torch.randn(N, K) / K**0.5) for _ in range(8)]
    biases = torch.randn(8, N) if spec.bias else torch.zeros(8, N)
    weights = [fmt.dequantize(weight).double() for weight in packed]
    order = sort_pairs(IDS.to(device), E)
    slots, starts = order.pairs.tolist(), order.starts.tolist()
    x, h = torch.randn(T, K).bfloat16(), torch.randn(T * topk, K).bfloat16()
    for gated in (True, False):
        stack = pack_for_gpu(fmt, packed if gated else packed[:4])
        out = torch.full((T * topk, N), float("nan"), dtype=torch.bfloat16, device=device)
        grouped.multiply(
            (x if gated else h).to(device),
            stack.to(device),
            out,
            plan,
            order=order,
            gated=gated,
            gather=gated,
            spec=spec,
            bias=biases.to(device) if spec.bias else None,
        )
        truth = torch.full((T * topk, N), float("nan"), dtype=torch.float64)
        for e in range(E):
            for row in range(starts[e], starts[e + 1]):
                if gated:
                    gate, up = weights[2 * e : 2 * e + 2]
                    token = x[slots[row] // topk].double()
                    of_gate, of_up = biases[2 * e : 2 * e + 2]
                    truth[row] = swiglu(gate @ token + of_gate, up @ token + of_up, spec)
                else:
                    truth[row] = weights[e] @ h[row].double() + biases[e]
        there = ~truth.isnan()
        assert torch.equal(there, ~out.cpu().isnan())  # rows of no expert are not written
        most = 8e-3 if launch.interpreted() else 5e-3  # the interpreter cuts where a GPU rounds
        assert relative_error(out.cpu()[there], truth[there]) < most


@pytest.mark.parametrize(
    "plan", [SkinnyExpertsPlan(16, 1), SkinnyExpertsPlan(32, 2, 4, 2, 2)], ids=str
)
def test_bytes_in_groups_of_32(plan: SkinnyExpertsPlan, device: torch.device) -> None:
    """A format that has no name of its own; half a chunk at the end, a bias."""
    fmt = Integer("int8 in groups of 32", 8, 32)
    weight = fmt.quantize(torch.randn(40, 448) / 448**0.5 * torch.rand(40, 448))
    x, stack = torch.randn(5, 448).bfloat16(), pack_for_gpu(fmt, [weight]).to(device)
    bias = torch.randn(40)
    out = torch.full((5, 40), float("nan"), dtype=torch.bfloat16, device=device)
    grouped.multiply(x.to(device), stack, out, plan, bias=bias.to(device))
    truth = ref.linear(x, weight, bias, fmt=fmt, dtype=torch.float64)
    assert relative_error(out.cpu(), truth) < (8e-3 if launch.interpreted() else 5e-3)


def test_inputs_that_begin_anywhere(device: torch.device) -> None:
    """They are read 16 bytes at a time, as pairs."""
    stack = made("int8", 24, 192)[1].to(device)
    buffer = torch.randn(3 * 192 + 4, device=device).bfloat16()
    for begin in (1, 2, 4):
        x = buffer[begin:][: 3 * 192].view(3, 192)
        odd, even = (x.new_full((3, 24), float("nan")) for _ in range(2))
        grouped.multiply(x, stack, odd, SkinnyExpertsPlan(16, 1, 8))
        grouped.multiply(x.clone(), stack, even, SkinnyExpertsPlan(16, 1, 8))
        assert torch.equal(odd, even)


def test_more_rows_than_have_columns_of_their_own_are_refused(device: torch.device) -> None:
    """Where a quad's lanes have scales of their own, a row has four columns."""
    stack, x = made("q4_k", 24, 256)[1].to(device), torch.randn(9, 256, device=device).bfloat16()
    out = torch.full((9, 24), float("nan"), dtype=torch.bfloat16, device=device)
    grouped.multiply(x, stack, out, SkinnyExpertsPlan(16, 1, 8))
    assert out.isfinite().all()
    with pytest.raises(PykernelsError, match="tokens=16 for q4_k"):
        grouped.multiply(x, stack, out, SkinnyExpertsPlan(16, 1, 16))
