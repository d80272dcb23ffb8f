"""Cached latents gathered into rows: every bit as the definition gathers them, nothing else."""

from __future__ import annotations

import pytest
import torch

from pykernels import ref
from pykernels.errors import PykernelsError
from pykernels.gpu.attention.mla_prefill import mla_prefill
from pykernels.gpu.attention.mla_read import mla_read
from pykernels.shapes import Ragged
from tests.gpu.caches import Paged, make_cache

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
SIZES = [
    ([0], 16, 32, 8),
    ([1], 16, 32, 8),
    ([16, 0, 33], 16, 40, 24),  # a whole page, none, three
    ([5, 70], 64, 512, 64),
    pytest.param([4000, 1, 32768], 64, 512, 64, marks=pytest.mark.gpu),
]


def cache_of(lengths: list[int], page: int, L: int, R: int, eight: bool, device: torch.device):
    """As `mla_decode`'s: NaN where nothing may be read, pages that do not exist behind."""
    return make_cache(lengths, page, [(L,), (R,)], device, fp8=(eight, False))


def gathered(function, cache: Paged, starts: torch.Tensor, rows: int) -> list[torch.Tensor]:
    """The results, poisoned before: a row of no token stays NaN."""
    widths = [x.shape[-1] for x in cache.values]
    out = [torch.full((rows, D), torch.nan, device=starts.device, dtype=BF16) for D in widths]
    scale = cache.scales[0]
    found = function(*cache.values, cache.table, starts, cache.lengths, rows, scale, tuple(out))
    assert found[0] is out[0] and found[1] is out[1]
    return out


@pytest.mark.parametrize("eight", [False, True])
@pytest.mark.parametrize(("lengths", "page", "L", "R"), SIZES)
def test_mla_read(
    lengths: list[int], page: int, L: int, R: int, eight: bool, device: torch.device
) -> None:
    cache = cache_of(lengths, page, L, R, eight, device)
    gaps = torch.tensor([n + 3 for n in lengths], device=device)
    starts = (gaps.cumsum(0) - gaps + 2).int()  # rows of nobody before, between and behind
    rows = int(gaps.sum()) + 2
    mine, truth = (gathered(f, cache, starts, rows) for f in (mla_read, ref.mla_read))
    for found, expected in zip(mine, truth, strict=True):
        assert torch.equal(found.view(torch.int16), expected.view(torch.int16))
        assert int(found.isnan().all(1).sum()) == rows - sum(lengths)


def test_every_code_keeps_its_sign(device: torch.device) -> None:
    """Of zeros too, which are few among random codes."""
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(2, 16, 8)
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    table, scale = torch.arange(2, device=device).int()[None], torch.rand(2, 16, device=device) + 1
    rope = torch.zeros(2, 16, 8, dtype=BF16, device=device)
    given = (codes.view(E4M3), rope, table, zero, zero + 32, 32, scale)
    (found, _), (expected, _) = mla_read(*given), ref.mla_read(*given)
    assert int(expected.isnan().sum()) == 2
    assert torch.equal(found.isnan(), expected.isnan())
    numbers = ~expected.isnan()
    assert torch.equal(found.view(torch.int16)[numbers], expected.view(torch.int16)[numbers])


def test_a_prefill_behind_it_sees_the_cached_prefix(device: torch.device) -> None:
    """The prefix from pages, expanded, and new tokens after it: as if all had been computed."""
    NH, D, L, R, prefix, new = 2, 32, 64, 16, 21, 7
    cache = cache_of([prefix], 16, L, R, False, device)
    up = (torch.randn(L, NH * 2 * D, device=device) / L**0.5).to(BF16)
    fresh = torch.randn(new, L, device=device).to(BF16), torch.randn(new, R, device=device).to(BF16)
    q = torch.randn(new, NH, D, device=device).to(BF16)
    q_rope = torch.randn(new, NH, R, device=device).to(BF16)
    K = prefix + new
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    batch = Ragged(zero, zero + new, zero + K, new, k_starts=zero)

    def attend(latent: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        k, v = (latent.float() @ up.float()).to(BF16).view(K, NH, 2 * D).split(D, -1)
        return mla_prefill(q, q_rope, k, rope, v, batch, scale=0.1)

    out = tuple(torch.full((K, n), torch.nan, device=device, dtype=BF16) for n in (L, R))
    mla_read(*cache.values, cache.table, zero, cache.lengths, K, None, out)
    for rows, last in zip(out, fresh, strict=True):
        rows[prefix:] = last
    pages = cache.table[0, : -(-prefix // 16)].long()
    whole = [
        torch.cat([x[pages].flatten(0, 1)[:prefix], last])
        for x, last in zip(cache.values, fresh, strict=True)
    ]
    assert torch.equal(attend(*out), attend(*whole))


def _call(device: torch.device, **other) -> None:
    given = {
        "latent": torch.zeros(2, 16, 64, device=device, dtype=BF16),
        "rope": torch.zeros(2, 16, 8, device=device, dtype=BF16),
        "page_table": torch.zeros(1, 2, device=device, dtype=torch.int32),
        "starts": torch.zeros(1, device=device, dtype=torch.int32),
        "lengths": torch.zeros(1, device=device, dtype=torch.int32) + 5,
        "rows": 5,
    }
    mla_read(**{**given, **other})


REFUSED = [
    ("E4M3 without scales", lambda d: {"latent": torch.zeros(2, 16, 64, device=d).to(E4M3)}),
    ("scales without E4M3", lambda d: {"latent_scale": torch.zeros(2, 16, device=d)}),
    ("other pages", lambda d: {"rope": torch.zeros(2, 8, 8, device=d, dtype=BF16)}),
    ("latents of nothing", lambda d: {"latent": torch.zeros(2, 16, 0, device=d, dtype=BF16)}),
    ("another dtype", lambda d: {"rope": torch.zeros(2, 16, 8, device=d)}),
    ("int64 lengths", lambda d: {"lengths": torch.zeros(1, device=d).long()}),
    ("starts of more", lambda d: {"starts": torch.zeros(2, device=d).int()}),
    ("out of fewer rows", lambda d: {"out": tuple(
        torch.zeros(4, n, device=d, dtype=BF16) for n in (64, 8))}),
]  # fmt: skip


def test_what_is_refused_is_refused_for_its_own_reason(device: torch.device) -> None:
    _call(device)


@pytest.mark.parametrize("other", [row[1] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_refused(other, device: torch.device) -> None:
    with pytest.raises(PykernelsError):
        _call(device, **other(device))


def _meta(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _read(dtype: torch.dtype) -> None:
    where = (_meta(4, 512, dtype=torch.int32), *[_meta(4, dtype=torch.int32)] * 2, 8192)
    scale = _meta(99, 64, dtype=torch.float32) if dtype == E4M3 else None
    mla_read(_meta(99, 64, 512, dtype=dtype), _meta(99, 64, 64), *where, scale)


COMPILES = [("bf16", lambda: _read(BF16)), ("e4m3", lambda: _read(E4M3))]
