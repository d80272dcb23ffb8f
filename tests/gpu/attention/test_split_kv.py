"""Split-KV: how MLA's results of its splits, float16 by tiles, become one."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from pykernels import ref
from pykernels.gpu.attention.mla_decode import mla_decode
from pykernels.gpu.attention.mla_split_kv import TilePartials
from pykernels.gpu.plans.attention import DecodePlan
from pykernels.testing import relative_error

from ..caches import BF16
from .inputs import mla_inputs

PLAN = DecodePlan(rows=64, keys=64, num_warps=8, num_stages=1, ctas_per_sm=9, warp_specialized=True)


def as_documented(partials: TilePartials) -> tuple[torch.Tensor, torch.Tensor]:
    """Splits [n, rows, 512] and log-sum-exps [n, rows], float64, from where they are stored."""
    n, tiles = partials.lse.shape[:2]
    lse, *powers = partials.lse.double().unbind(2)
    x = partials.values.double().view(n, tiles, 2, 8, 8, 8, 4, 4, 2)  # ..., group, n, row, lane
    x = x.permute(0, 1, 3, 5, 2, 4, 7, 6, 8).reshape(n, tiles * 64, 2, 256)
    scaled = [x[:, :, i] * power.reshape(n, -1, 1) for i, power in enumerate(powers)]
    return torch.cat(scaled, -1), lse.reshape(n, -1)


@pytest.mark.parametrize("total", [9, 23, 40, 80, pytest.param(140, marks=pytest.mark.gpu)])
def test_any_number_of_splits_is_combined(total: int, device, hopper) -> None:
    """Every size that is compiled; weights from 1 to 0, powers over float32's range, empty splits.

    What an empty split has for values and powers was never written: NaN here.
    """
    B, R, blocks = 2, 72 if total < 10 else 20, [70, 30]
    out = torch.full((B, R, 512), float("nan"), dtype=BF16, device=device)
    lengths = torch.tensor([64 * n for n in blocks], dtype=torch.int32, device=device)
    partials = TilePartials(out, total)
    assert partials.split
    partials.values.copy_(torch.randn(partials.values.shape) * 8000)
    partials.lse[:, :, 0] = torch.randn(total, partials.tiles, 64) * 20
    # A row's are alike, or one alone would be the result.
    exponents = torch.randint(-90, 90, (1, partials.tiles, 2, 64))
    exponents = exponents + torch.randint(-2, 2, (total, *exponents.shape[1:]))
    partials.lse[:, :, 1:] = torch.exp2(exponents.float())
    empty = torch.arange(0, total, 4)
    partials.lse[empty, :, 0] = float("-inf")
    partials.values[empty] = float("nan")
    partials.lse[empty, :, 1:] = float("nan")
    partials.lse[:, :, 0, 5] = float("-inf")  # a row without keys
    values, lse = as_documented(partials)
    want, first = [], 0
    for b in range(B):
        count = 1 + (total - B) * blocks[b] // sum(blocks)
        weights = (lse[first : first + count] * math.log(2)).softmax(0)  # they are of base 2
        weights = torch.nan_to_num(weights)[..., None]
        x = torch.where(weights > 0, values[first : first + count], 0.0)
        want.append((weights * x).sum(0)[:R])
        first += count
    partials.combine(lengths, 1, None, 64)
    for half in (slice(0, 256), slice(256, 512)):
        exact = torch.stack(want)[..., half]
        size = exact.abs().amax(-1, keepdim=True).clamp(min=1e-300)  # else one row is all
        assert relative_error(out[..., half].double() / size, exact / size) < 8e-3
    assert out[:, 5].count_nonzero() == 0 and not out.isnan().any()


@pytest.mark.parametrize("scale", [1e30, 1e-30, 0.0], ids="{:.0e}".format)
def test_values_beyond_float16(scale: float, device, hopper) -> None:
    """Halves of very different sizes: each has its own power of two."""
    inputs, options = mla_inputs([150, 64], device, L=512, R=64, page=64)
    inputs[0].mul_(1 / max(scale, 1.0))  # scores as ever
    inputs[2][..., :256] *= scale
    out = mla_decode(*inputs, **options, plan=PLAN)
    exact = ref.mla_decode(*inputs, **options, dtype=torch.float64)
    native = ref.mla_decode(*inputs, **options, dtype=BF16)
    for half in (slice(0, 256), slice(256, 512)):
        yardstick = relative_error(native[..., half].double(), exact[..., half])
        assert relative_error(out[..., half].double(), exact[..., half]) <= max(yardstick, 8e-3)


@pytest.mark.gpu
def test_splits_are_more_exact_than_the_result(device, hopper) -> None:
    """Against one CTA a sequence, which rounds once: at most an eighth of a rounding more."""
    inputs, options = mla_inputs([4000, 1000], device, L=512, R=64, page=64, NH=128)
    exact = ref.mla_decode(*inputs, **options, dtype=torch.float64)

    def error(plan: Any) -> float:
        return relative_error(mla_decode(*inputs, **options, plan=plan).double(), exact)

    assert error(PLAN) <= 1.125 * error(replace(PLAN, ctas_per_sm=0))
