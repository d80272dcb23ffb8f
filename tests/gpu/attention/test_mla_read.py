"""Cached latents gathered into rows: every bit as the definition gathers them, nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pykernels import ref
from pykernels.errors import PykernelsError
from pykernels.gpu.attention.mla_read import mla_read

from ..caches import BF16, make_cache
from ..caches import FP8 as E4M3
from .inputs import meta

SIZES = [
    ([0], 16, 32, 8),
    ([16, 0, 33], 16, 40, 24),  # a whole page, none, three
    ([5, 70], 64, 512, 64),
    pytest.param([4000, 1, 32768], 64, 512, 64, marks=pytest.mark.gpu),
]


@pytest.mark.parametrize("eight", [False, True])
@pytest.mark.parametrize(("lengths", "page", "L", "R"), SIZES)
def test_mla_read(
    lengths: list[int], page: int, L: int, R: int, eight: bool, device: torch.device
) -> None:
    cache = make_cache(lengths, page, [(L,), (R,)], device, fp8=(eight, False))
    gaps = torch.tensor([n + 3 for n in lengths], device=device)
    starts = (gaps.cumsum(0) - gaps + 2).int()  # rows of nobody before, between and behind
    rows, kept = int(gaps.sum()) + 2, []
    for read in (mla_read, ref.mla_read):
        out = tuple(torch.full((rows, n), torch.nan, device=device, dtype=BF16) for n in (L, R))
        where = (cache.table, starts, cache.lengths, rows, cache.scales[0], out)
        assert all(a is b for a, b in zip(read(*cache.values, *where), out, strict=True))
        kept.append(out)
    for found, expected in zip(*kept, strict=True):
        assert torch.equal(found.view(torch.int16), expected.view(torch.int16))
        assert int(found.isnan().all(1).sum()) == rows - sum(lengths)


REFUSED: list[tuple[str, Callable[[torch.device], dict[str, Any]]]] = [
    ("E4M3 without scales", lambda d: {"latent": torch.zeros(2, 16, 64, device=d).to(E4M3)}),
    ("scales without E4M3", lambda d: {"latent_scale": torch.zeros(2, 16, device=d)}),
    ("other pages", lambda d: {"rope": torch.zeros(2, 8, 8, device=d, dtype=BF16)}),
    ("another dtype", lambda d: {"rope": torch.zeros(2, 16, 8, device=d)}),
    ("int64 lengths", lambda d: {"lengths": torch.zeros(1, device=d).long()}),
    ("starts of more", lambda d: {"starts": torch.zeros(2, device=d).int()}),
    (
        "out of fewer rows",
        lambda d: {"out": tuple(torch.zeros(4, n, device=d, dtype=BF16) for n in (64, 8))},
    ),
]


@pytest.mark.parametrize("other", [row[1] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_refused(other: Callable[[Any], dict[str, Any]], device: torch.device) -> None:
    given: dict[str, Any] = {
        "latent": torch.zeros(2, 16, 64, device=device, dtype=BF16),
        "rope": torch.zeros(2, 16, 8, device=device, dtype=BF16),
        "page_table": torch.zeros(1, 2, device=device, dtype=torch.int32),
        "starts": torch.zeros(1, device=device, dtype=torch.int32),
        "lengths": torch.zeros(1, device=device, dtype=torch.int32) + 5,
        "rows": 5,
    }
    mla_read(**given)
    with pytest.raises(PykernelsError):
        mla_read(**given | other(device))


def _read(dtype: torch.dtype) -> None:
    where = (meta(4, 512, dtype=torch.int32), *[meta(4, dtype=torch.int32)] * 2, 8192)
    scale = meta(99, 64, dtype=torch.float32) if dtype == E4M3 else None
    mla_read(meta(99, 64, 512, dtype=dtype), meta(99, 64, 64), *where, scale)


COMPILES = [("e4m3", lambda: _read(E4M3))]
COMPILES_ON_A_GPU = [("bf16", lambda: _read(BF16))]
