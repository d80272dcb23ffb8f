"""int8 activations: the specification, value by value, and the reference that uses them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pykernels import ref
from pykernels.errors import PykernelsError
from pykernels.quant import FORMATS, get_format
from pykernels.quant.activations import GROUPS, dequantize, quantize, sums
from pykernels.shapes import MoEShape
from pykernels.testing import balanced_routing, random_experts

F = np.float32


def _by_hand(row: np.ndarray, kind: str) -> tuple[list[int], float]:
    """One group, one value at a time, in NumPy float32 scalars."""
    peak = F(0)
    for v in row:
        if abs(v) > abs(peak):
            peak = v
    if peak == 0:
        return [0] * len(row), 0.0
    if kind == "q8":
        scale = abs(peak) / F(127)
        inverse = F(1) / scale
    else:
        inverse = F(-127) / peak
        scale = F(1) / inverse
    # Python's round takes ties to even, and the product is a float32.
    codes = [min(127, max(-127, round(float(F(v) * inverse)))) for v in row]
    return codes, float(scale)


def _rows(group: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(group)
    gauss = torch.randn(group, generator=g)
    tie = torch.zeros(group)
    tie[:5] = torch.tensor([127.0, 0.5, 1.5, -2.5, 126.5])
    twins = gauss.clamp(-1, 1)
    twins[3], twins[9] = 2.0, -2.0
    return {
        "gaussian": gauss,
        "bf16 inputs": gauss.bfloat16().float(),
        "zeros": torch.zeros(group),
        "ties go to even": tie,
        "two peaks of unlike sign: the first counts": twins,
        "the peak is negative": -gauss.abs() - 1,
        "tiny": gauss * 1e-30,
        "large": gauss * 1e30,
    }


@pytest.mark.parametrize("kind", GROUPS)
@pytest.mark.parametrize("case", _rows(128))
def test_each_code_is_as_specified(kind, case):
    group = GROUPS[kind]
    row = _rows(group)[case]
    both = torch.stack((torch.cat((row, torch.ones(group))), torch.cat((torch.ones(group), row))))
    made = quantize(both, kind)
    assert made.q.dtype == torch.int8 and made.scale.dtype == torch.float32
    codes, scale = _by_hand(row.numpy(), kind)
    assert made.q[0, :group].tolist() == codes and made.q[1, group:].tolist() == codes
    assert made.scale[0, 0] == scale == made.scale[1, 1]


@pytest.mark.parametrize("kind", GROUPS)
def test_a_group_too_small_for_an_inverse_is_zero(kind):
    made = quantize(torch.full((1, 300), 1e-39), kind)
    assert not made.q.any() and not made.scale.any()


@pytest.mark.parametrize("kind", GROUPS)
@pytest.mark.parametrize("K", [1, 256, 300], ids=lambda K: f"K={K}")
def test_codes_are_within_half_a_step(kind, K):
    x = torch.randn(5, K)
    made = quantize(x, kind)
    assert made.q.shape == (5, K) and made.scale.shape == (5, -(-K // GROUPS[kind]))
    step = made.scale.abs().repeat_interleave(GROUPS[kind], dim=1)[:, :K]
    assert ((dequantize(made) - x).abs() <= step * 0.5001).all()


def test_sums_are_of_whole_and_short_groups():
    q = torch.full((2, 40), -127, dtype=torch.int8)
    assert sums(q, 16).tolist() == [[-2032, -2032, -1016]] * 2
    assert sums(q, 16).dtype == torch.int32


@pytest.mark.parametrize("name", [name for name, fmt in FORMATS.items() if fmt.int8_kind])
def test_the_reference_quantizes_x_and_h(name):
    """Against a formula written out: integer sums of codes, scaled at the end."""
    fmt, shape = get_format(name), MoEShape(E=2, H=256, I=256, topk=1)
    experts = random_experts(shape, fmt)
    x, ids, one = torch.randn(3, 256), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    seen = ref.moe_ffn(x, ids, one, experts, dtype=torch.float64, activations="int8")

    def product(v: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        a = quantize(v.bfloat16(), fmt.int8_kind)
        group = GROUPS[fmt.int8_kind]
        parts = [
            (a.q[:, i : i + group].double() @ weight[:, i : i + group].T) * a.scale[:, g : g + 1]
            for g, i in enumerate(range(0, 256, group))
        ]
        return sum(parts)

    gate, up, down = (fmt.dequantize(w).double() for w in experts.unpack(0))
    h = torch.nn.functional.silu(product(x, gate)) * product(x, up)
    assert torch.allclose(seen, product(h, down), rtol=1e-12, atol=1e-12)
    plain = ref.moe_ffn(x, ids, one, experts, dtype=torch.float64)
    away = (seen - plain).norm() / plain.norm()
    assert 1e-3 < away < 0.05, "int8 activations cost something, and not much"


@pytest.mark.parametrize(
    ("name", "kind", "told"),
    [
        *((n, "int8", f"{n} weights are not") for n, f in FORMATS.items() if not f.int8_kind),
        ("int8", "fp4", "no 'fp4' activations"),
    ],
)
def test_what_the_reference_cannot_multiply_is_refused(name, kind, told):
    shape = MoEShape(E=2, H=256, I=256, topk=1)
    routing, experts = balanced_routing(1, shape), random_experts(shape, get_format(name))
    with pytest.raises(PykernelsError, match=told):
        ref.moe_ffn(torch.zeros(1, 256), routing.ids, routing.weights, experts, activations=kind)


def test_unknown_kinds_are_refused():
    with pytest.raises(PykernelsError, match="no 'q4' activations"):
        quantize(torch.zeros(1, 1), "q4")
