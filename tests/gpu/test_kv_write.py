"""The paged cache's writes: every bit as the definition writes them, nothing else touched."""

from __future__ import annotations

import pytest
import torch

from pykernels import ref
from pykernels.errors import PykernelsError
from pykernels.gpu.attention.kv_write import kv_write, mla_write

E4M3 = torch.float8_e4m3fn


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def poison(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full(shape, torch.nan, device=device).to(dtype)


def slots_of(T: int, places: int, device: torch.device) -> torch.Tensor:
    """Distinct places in disorder, some tokens nowhere: before the cache and behind it."""
    slots = torch.randperm(places, device=device)[:T]
    slots[T // 2 : T // 2 + 1] = -1
    slots[T // 2 + 1 : T // 2 + 2] = places
    return slots


def rows(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Of very different sizes, with a row of zeros; bf16's values in any dtype, so that a cache
    of bf16 takes them unrounded (the interpreter cuts)."""
    x = torch.randn(*shape, device=device) * 2.0 ** torch.randint(-12, 12, shape, device=device)
    x[:1] = 0
    return x.bfloat16().to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float32, E4M3])
@pytest.mark.parametrize(("T", "L", "R"), [(0, 64, 16), (1, 512, 64), (9, 512, 64), (5, 100, 24)])
def test_mla_write(
    T: int, L: int, R: int, cache_dtype: torch.dtype, dtype: torch.dtype, device: torch.device
) -> None:
    wide = rows(T, L + R, dtype=dtype, device=device)  # kv_a_proj's output
    slots = slots_of(T, 4 * 16, device)

    def caches() -> list[torch.Tensor | None]:
        rope_dtype = torch.bfloat16 if cache_dtype == E4M3 else cache_dtype
        made = [
            poison(4, 16, L, dtype=cache_dtype, device=device),
            poison(4, 16, R, dtype=rope_dtype, device=device),
        ]
        scale = poison(4, 16, dtype=torch.float32, device=device) if cache_dtype == E4M3 else None
        return [*made, scale]

    mine, theirs = caches(), caches()
    mla_write(wide[:, :L], wide[:, L:], slots, *mine)
    ref.mla_write(wide[:, :L], wide[:, L:], slots.int(), *theirs)
    for found, truth in zip(mine, theirs, strict=True):
        assert (found is None) == (truth is None)
        if found is not None:
            assert torch.equal(bits(found), bits(truth))


@pytest.mark.parametrize("eight", [False, True])
@pytest.mark.parametrize(("T", "KVH", "D"), [(1, 1, 64), (7, 8, 128), (3, 5, 96), (2, 40, 256)])
def test_kv_write(T: int, KVH: int, D: int, eight: bool, device: torch.device) -> None:
    k, v = (rows(T, KVH, D, dtype=torch.bfloat16, device=device) for _ in range(2))
    slots = slots_of(T, 3 * 8, device).int()
    cache_dtype = E4M3 if eight else torch.bfloat16

    def caches() -> list[torch.Tensor | None]:
        made = [poison(3, 8, KVH, D, dtype=cache_dtype, device=device) for _ in range(2)]
        scales = [poison(3, 8, KVH, dtype=torch.float32, device=device) for _ in range(2)]
        return [*made, *(scales if eight else (None, None))]

    mine, theirs = caches(), caches()
    kv_write(k, v, slots, *mine)
    ref.kv_write(k, v, slots, *theirs)
    for found, truth in zip(mine, theirs, strict=True):
        if found is not None:
            assert torch.equal(bits(found), bits(truth))


def test_every_e4m3_code_and_every_tie_between_two(device: torch.device) -> None:
    """A row whose largest magnitude is 448 has scale 1: its values are encoded as they are."""
    codes = torch.arange(127, dtype=torch.uint8).view(E4M3).float()  # 0 .. 448
    ties = (codes[1:] + codes[:-1]) / 2
    near = torch.cat([ties * (1 - 2e-7), ties * (1 + 2e-7)])
    x = torch.cat([codes, ties, near, torch.rand(1000) * 0.02])
    x = torch.cat([x, -x])[None, :].to(device)
    D = x.shape[1]
    cache = torch.zeros(1, 1, D, dtype=E4M3, device=device)
    rope = torch.zeros(1, 1, D, device=device)
    scale = torch.zeros(1, 1, device=device)
    mla_write(x, x, torch.zeros(1, dtype=torch.int32, device=device), cache, rope, scale)
    assert scale.item() == 1.0 and torch.equal(rope[0], x)
    assert torch.equal(bits(cache[0]), bits(x.to(E4M3)))


def test_a_nan_is_kept(device: torch.device) -> None:
    x = torch.ones(1, 64, device=device)
    x[0, 3] = torch.nan
    cache = torch.zeros(1, 1, 64, dtype=E4M3, device=device)
    scale = torch.zeros(1, 1, device=device)
    mla_write(x, x, torch.zeros(1).int().to(device), cache, torch.zeros_like(x)[None], scale)
    assert cache.float()[0, 0].isnan().nonzero().tolist() == [[3]]
    assert scale.item() == pytest.approx(1 / 448)


def test_what_is_no_number_has_no_part_in_a_scale(device: torch.device) -> None:
    """Nor has a row a scale of 0 or NaN, which would make NaN of numbers."""
    tiny = 5e-43  # its 448th part rounds to the least number above 0, or to 0
    kinds = ([torch.nan, 3.0, -1.0], [torch.nan] * 3, [torch.inf, 1.0, 0.0], [tiny, 0.0, -tiny])
    for D in (3, 4):  # as it is, and padded in the kernel
        x = torch.tensor([[*row, *row[:1]][:D] for row in kinds], device=device)
        slots = torch.arange(4, device=device)

        def caches(D: int = D) -> list[torch.Tensor]:
            made = poison(1, 4, D, dtype=E4M3, device=device), torch.zeros(1, 4, D, device=device)
            return [*made, torch.zeros(1, 4, device=device)]

        mine, theirs = caches(), caches()
        mla_write(x, x, slots, *mine)
        ref.mla_write(x, x, slots, *theirs)
        for found, truth in zip(mine, theirs, strict=True):
            torch.testing.assert_close(found.float(), truth.float(), rtol=0, atol=0, equal_nan=True)
        assert torch.equal(mine[0][0, [0, 1, 3]].isnan(), x[[0, 1, 3]].isnan())
        assert mine[2][0, :3].tolist() == [(torch.tensor(3.0) / 448).item(), 1.0, torch.inf]


@pytest.mark.gpu
def test_captured_and_replayed(device: torch.device) -> None:
    x = torch.randn(4, 576, device=device).bfloat16()
    slots = torch.arange(4, device=device)
    cache = torch.zeros(8, 64, 512, dtype=E4M3, device=device)
    rope = torch.zeros(8, 64, 64, dtype=torch.bfloat16, device=device)
    scale = torch.zeros(8, 64, device=device)
    mla_write(x[:, :512], x[:, 512:], slots, cache, rope, scale)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mla_write(x[:, :512], x[:, 512:], slots, cache, rope, scale)
    truth = [t.clone() for t in (cache, rope, scale)]
    for _ in range(3):
        x.normal_()
        slots.copy_(torch.randperm(512, device=device)[:4])
        graph.replay()
        ref.mla_write(x[:, :512], x[:, 512:], slots, *truth)
        for found, expected in zip((cache, rope, scale), truth, strict=True):
            assert torch.equal(bits(found), bits(expected))


def _call(device: torch.device, **other: torch.Tensor | None) -> None:
    given = {
        "latent": torch.zeros(2, 64, device=device),
        "rope": torch.zeros(2, 16, device=device),
        "slots": torch.arange(2, device=device),
        "latent_cache": torch.zeros(1, 8, 64, device=device),
        "rope_cache": torch.zeros(1, 8, 16, device=device),
        "latent_scale": None,
    }
    mla_write(**{**given, **other})


REFUSED = [
    ("float slots", lambda d: {"slots": torch.zeros(2, device=d)}),
    ("a slot too few", lambda d: {"slots": torch.arange(1, device=d)}),
    ("a cache of another width", lambda d: {"latent_cache": torch.zeros(1, 8, 65, device=d)}),
    ("a cache of other pages", lambda d: {"rope_cache": torch.zeros(2, 4, 16, device=d)}),
    ("E4M3 without scales", lambda d: {"latent_cache": torch.zeros(1, 8, 64, device=d).to(E4M3)}),
    ("scales without E4M3", lambda d: {"latent_scale": torch.zeros(1, 8, device=d)}),
    (
        "rows of nothing",
        lambda d: {
            "rope": torch.zeros(2, 0, device=d),
            "rope_cache": torch.zeros(1, 8, 0, device=d),
            "latent": torch.zeros(2, 0, device=d),
            "latent_cache": torch.zeros(1, 8, 0, device=d),
        },
    ),
    ("a cache of integers", lambda d: {"rope_cache": torch.zeros(1, 8, 16, device=d).int()}),
]


def test_what_is_refused_is_refused_for_its_own_reason(device: torch.device) -> None:
    _call(device)


@pytest.mark.parametrize("other", [row[1] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_refused(other, device: torch.device) -> None:
    with pytest.raises(PykernelsError):
        _call(device, **other(device))


def test_slots_with_gaps_are_told_as_such(device: torch.device) -> None:
    with pytest.raises(PykernelsError, match="slots for 2"):
        _call(device, slots=torch.arange(4, device=device)[::2])


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


COMPILES = [
    ("mla, e4m3", lambda: mla_write(
        _meta(8, 512), _meta(8, 64), _meta(8, dtype=torch.int64), _meta(9, 64, 512, dtype=E4M3),
        _meta(9, 64, 64), _meta(9, 64, dtype=torch.float32))),
    ("gqa, bf16", lambda: kv_write(
        _meta(8, 8, 128), _meta(8, 8, 128), _meta(8, dtype=torch.int32), _meta(9, 64, 8, 128),
        _meta(9, 64, 8, 128))),
]  # fmt: skip
