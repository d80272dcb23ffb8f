"""Parts of MLA decode as float16: their combination, sizes beyond float16's range, streams."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import pykernels.gpu.common.launch as launch
from pykernels import ref
from pykernels.gpu.attention.mla_split_kv import TileParts
from pykernels.gpu.plans.attention import DecodePlan, warp_specialized_takes

from .caches import BF16, relative_error
from .test_attention_decode import check, mla, mla_inputs
from .test_attention_hopper import warp_specialized

_warp_specialized = warp_specialized  # a fixture


@pytest.fixture
def split(request: pytest.FixtureRequest, device: torch.device) -> DecodePlan:
    """A plan of many parts for the kernel by hand, interpreted where there is no Hopper."""
    if launch.interpreted():
        request.getfixturevalue("warp_specialized")
    elif not warp_specialized_takes(512, 64, False, 64, device):
        pytest.skip("written for Hopper")
    return DecodePlan(rows=64, keys=64, warps=8, stages=1, per_sm=9, warp_specialized=True)


def as_documented(parts: TileParts) -> tuple[torch.Tensor, torch.Tensor]:
    """Parts [slots, rows, 512] and log-sum-exps [slots, rows], float64, from where they lie."""
    slots, tiles = parts.lse.shape[:2]
    lse, *powers = parts.lse.double().unbind(2)
    x = parts.values.double().view(slots, tiles, 2, 8, 8, 8, 4, 4, 2)  # ..., group, n, row, lane
    x = x.permute(0, 1, 3, 5, 2, 4, 7, 6, 8).reshape(slots, tiles * 64, 2, 256)
    scaled = [x[:, :, i] * power.reshape(slots, -1, 1) for i, power in enumerate(powers)]
    return torch.cat(scaled, -1), lse.reshape(slots, -1)


@pytest.mark.parametrize("slots", [9, 23, 40, 80, pytest.param(140, marks=pytest.mark.gpu)])
def test_parts_of_any_number_become_one(slots: int, split: DecodePlan, device) -> None:
    """Every size that is compiled; weights from 1 to 0, powers over float32's range, empty parts.

    What an empty part has for values and powers nobody wrote: NaN here.
    """
    B, R, blocks = 2, 72 if slots < 10 else 20, [70, 30]
    out = torch.full((B, R, 512), float("nan"), dtype=BF16, device=device)
    lengths = torch.tensor([64 * n for n in blocks], dtype=torch.int32, device=device)
    parts = TileParts(out, slots)
    assert parts.split
    parts.values.copy_(torch.randn(parts.values.shape) * 8000)
    parts.lse[:, :, 0] = torch.randn(slots, parts.tiles, 64) * 20
    # A row's are alike, or one alone would be the result.
    exponents = torch.randint(-90, 90, (1, parts.tiles, 2, 64))
    exponents = exponents + torch.randint(-2, 2, (slots, *exponents.shape[1:]))
    parts.lse[:, :, 1:] = torch.exp2(exponents.float())
    empty = torch.arange(0, slots, 4)
    parts.lse[empty, :, 0] = float("-inf")
    parts.values[empty] = float("nan")
    parts.lse[empty, :, 1:] = float("nan")
    parts.lse[:, :, 0, 5] = float("-inf")  # a row that sees nothing
    values, lse = as_documented(parts)
    want, first = [], 0
    for b in range(B):
        count = 1 + (slots - B) * blocks[b] // sum(blocks)
        weights = (lse[first : first + count] * math.log(2)).softmax(0)  # they are of base 2
        weights = torch.nan_to_num(weights)[..., None]
        x = torch.where(weights > 0, values[first : first + count], 0.0)
        want.append((weights * x).sum(0)[:R])
        first += count
    parts.combine(lengths, 1, None, 64)
    for half in (slice(0, 256), slice(256, 512)):
        exact = torch.stack(want)[..., half]
        size = exact.abs().amax(-1, keepdim=True).clamp(min=1e-300)  # else one row is all
        assert relative_error(out[..., half].double() / size, exact / size) < 8e-3
    assert out[:, 5].count_nonzero() == 0 and not out.isnan().any()


@pytest.mark.parametrize("scale", [1e30, 1e5, 1.0, 1e-30], ids="{:.0e}".format)
def test_values_beyond_float16(scale: float, split: DecodePlan, device) -> None:
    """Halves of very different sizes: each has its own power of two."""
    inputs, options = mla_inputs([150, 64], device, L=512, R=64, page=64)
    inputs[0].mul_(1 / max(scale, 1.0))  # scores as ever
    inputs[2][..., :256] *= scale
    out = mla(*inputs, **options, plan=split)
    exact = ref.mla_decode(*inputs, **options, dtype=torch.float64)
    native = ref.mla_decode(*inputs, **options, dtype=BF16)
    for half in (slice(0, 256), slice(256, 512)):
        yardstick = relative_error(native[..., half].double(), exact[..., half])
        assert relative_error(out[..., half].double(), exact[..., half]) <= max(yardstick, 8e-3)


def test_zeros_stay_zeros(split: DecodePlan, device) -> None:
    inputs, options = mla_inputs([150], device, L=512, R=64, page=64)
    inputs[2].zero_()
    out = mla(*inputs, **options, plan=split)
    assert out.count_nonzero() == 0 and not out.isnan().any()


def test_parts_in_which_a_row_sees_no_key(split: DecodePlan, device) -> None:
    """Of the last part's two keys the first two of four new tokens see none."""
    inputs, options = mla_inputs([66, 2, 0], device, L=512, R=64, page=64, S=4, NH=16)
    check(mla, ref.mla_decode, inputs, options, plan=split)


def test_infinite_values_behind_the_end(split: DecodePlan, device) -> None:
    """NaN is there in every test; here infinities."""
    inputs, options = mla_inputs([70, 130], device, L=512, R=64, page=64)
    behind = inputs[2].isnan()
    assert behind.any()
    want = mla(*inputs, **options, plan=split)
    inputs[2].masked_fill_(behind, float("inf"))
    assert torch.equal(mla(*inputs, **options, plan=split), want)


@pytest.mark.gpu
def test_parts_are_more_exact_than_the_result(split: DecodePlan, device) -> None:
    """Against one program a sequence, which rounds once: at most an eighth of a rounding more."""
    inputs, options = mla_inputs([4000, 1000], device, L=512, R=64, page=64, NH=128)
    exact = ref.mla_decode(*inputs, **options, dtype=torch.float64)
    whole = DecodePlan(rows=64, keys=64, warps=8, stages=1, per_sm=0, warp_specialized=True)
    error: Callable[[Any], float] = lambda plan: relative_error(  # noqa: E731
        mla(*inputs, **options, plan=plan).double(), exact
    )
    assert error(split) <= 1.125 * error(whole)


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True])
def test_two_streams_have_their_own_parts(fp8: bool, device) -> None:
    cases = [mla_inputs([9000, n], device, NH=128, L=512, R=64, page=64, fp8=fp8) for n in (9, 500)]
    want = [mla(*inputs, **options) for inputs, options in cases]
    streams = [torch.cuda.Stream(device) for _ in cases]
    torch.cuda.synchronize()
    results: list[list[torch.Tensor]] = [[], []]
    for _ in range(20):
        for (inputs, options), stream, into in zip(cases, streams, results, strict=True):
            with torch.cuda.stream(stream):
                into.append(mla(*inputs, **options))
    torch.cuda.synchronize()
    for into, one in zip(results, want, strict=True):
        assert all(torch.equal(result, one) for result in into)
