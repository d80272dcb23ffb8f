"""What kernel tests measure with: a bound that is neither luck nor room for a coarser kernel."""

from __future__ import annotations

import functools

import pytest
import torch

from pykernels import ref
from pykernels.quant import get_format
from pykernels.shapes import MoEShape
from pykernels.testing import balanced_routing, flips, random_experts, relative_error

SHAPE = MoEShape(E=4, H=256, I=128, topk=2)


def _off(sign: int, h: torch.Tensor) -> torch.Tensor:
    """Sums that are all off by half of what ``flips`` looks at.

    (Whether a CPU's own are off where it matters depends on the order in which it adds.)
    """
    return h + sign * 2.0**-21 * (h.abs() + h.square().mean(-1, keepdim=True).sqrt())


@pytest.mark.parametrize("activations", ["bf16", "int8"])
def test_flips_bound_what_float32_sums_cost(activations: str) -> None:
    experts, routing = random_experts(SHAPE, get_format("int8")), balanced_routing(20, SHAPE)
    off, bounds, unrounded = [], [], []
    for seed in range(16):
        x = torch.randn(20, SHAPE.H, generator=torch.Generator().manual_seed(seed)).bfloat16()
        reference = functools.partial(
            ref.moe_ffn, x, routing.ids, routing.weights, experts, activations=activations
        )
        rounded = functools.partial(reference, h_dtype=torch.bfloat16)
        exact = functools.partial(rounded, dtype=torch.float64)
        truth = exact()
        bounds.append(flips(exact, truth))
        moved = (exact(nudge=functools.partial(_off, sign)) for sign in (1, -1))
        off.append(max(relative_error(y, truth) for y in moved))
        unrounded.append(relative_error(reference(dtype=torch.float64), truth))
        assert relative_error(rounded(dtype=torch.float32), truth) <= 1e-6 + bounds[-1], seed
        assert off[-1] <= 1e-6 + bounds[-1], seed
    assert sorted(bounds)[8] < 3e-4
    if activations == "bf16":  # with int8 the reference rounds h before it makes codes
        assert max(off) > 5e-4  # a large value flipped: no count of values would have told
        assert all(bound < without for bound, without in zip(bounds, unrounded, strict=True))
