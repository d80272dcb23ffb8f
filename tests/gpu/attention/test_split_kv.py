"""Split-KV: how many splits, which is whose, and how MLA's results of them become one."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from pykernels import ref
from pykernels.gpu.attention.mla_decode import mla_decode
from pykernels.gpu.attention.mla_split_kv import TilePartials
from pykernels.gpu.attention.online_softmax import find_split, load_lengths
from pykernels.gpu.plans.attention import DecodePlan
from pykernels.testing import relative_error

from ..caches import BF16
from .inputs import mla_inputs

PLAN = DecodePlan(rows=64, keys=64, warps=8, stages=1, ctas_per_sm=9, warp_specialized=True)


def test_splits_fill_the_gpu_once_and_know_no_lengths() -> None:
    plan = replace(PLAN, ctas_per_sm=1)
    assert plan.total_splits(1, 2, 66 * 640, 132) == 66
    assert plan.total_splits(1, 2, 1 << 16, 132) == 64  # 16 blocks each: two more would be empty
    assert replace(plan, min_blocks=3).total_splits(1, 2, 1 << 13, 132) == 43
    assert plan.total_splits(100, 2, 1 << 16, 132) == 100  # more sequences than room
    assert replace(plan, ctas_per_sm=32).total_splits(65, 2, 1 << 16, 132) == 65  # one each fills
    assert replace(plan, ctas_per_sm=32).total_splits(64, 2, 1 << 16, 132) > 64
    assert plan.total_splits(1, 1, 100, 132) == 2  # no more than there are blocks


@triton.jit
def _find_all(
    length_ptr, out, B, total_splits, S, window,
    KEYS: tl.constexpr, BATCH: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0)
    i, lengths = load_lengths(length_ptr, B, BATCH)
    b, length, split, num_splits = find_split(
        i, lengths, at, B, total_splits, S, window, KEYS, WINDOW
    )
    tl.store(out + at * 4, b)
    tl.store(out + at * 4 + 1, length)
    tl.store(out + at * 4 + 2, split)
    tl.store(out + at * 4 + 3, num_splits)


SPLITS = [
    ([700, 0, 64, 65, 1], 40, 1, 0, "ragged, an empty sequence, no window"),
    ([0, 0], 9, 1, 0, "no keys at all"),
    ([191, 192, 193, 640], 33, 1, 128, "a window that begins at a block's edge and beside it"),
    ([192, 193, 194, 129], 33, 2, 128, "the same for two tokens"),
    ([500] * 7, 7, 1, 100, "one each"),
]


@pytest.mark.parametrize(
    ("lengths", "total", "S", "window", "why"), SPLITS, ids=[row[-1] for row in SPLITS]
)
def test_every_split_of_every_sequence_is_found_once(
    lengths: list[int], total: int, S: int, window: int, why: str, device: torch.device
) -> None:
    keys = 64
    firsts = [max(0, n - S + 1 - window) // keys * keys if window else 0 for n in lengths]
    blocks = [-(-(n - first) // keys) for n, first in zip(lengths, firsts, strict=True)]
    counts = [1 + (total - len(lengths)) * n // max(sum(blocks), 1) for n in blocks]
    pairs = enumerate(zip(lengths, counts, strict=True))
    expected = [[b, length, i, count] for b, (length, count) in pairs for i in range(count)]
    assert len(expected) <= total
    given = torch.tensor(lengths, dtype=torch.int32, device=device)
    out = torch.full((total, 4), -1, dtype=torch.int32, device=device)
    _find_all[(total,)](
        given, out, len(lengths), total, S, window, KEYS=keys, BATCH=32, WINDOW=window > 0
    )
    assert out[: len(expected)].tolist() == expected
    assert out[len(expected) :, 3].eq(0).all()  # nothing to do


# --- MLA's results, as float16 by tiles


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
