"""The paged cache's writes: every bit as the definition writes them, nothing else touched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pykernels import ref
from pykernels.errors import PykernelsError
from pykernels.gpu.attention.kv_write import kv_write, mla_write

from ..caches import BF16
from ..caches import FP8 as E4M3
from ..ops import bits
from .inputs import meta

Caches = list[torch.Tensor | None]


def poison(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full(shape, torch.nan, device=device).to(dtype)


def slots_of(T: int, room: int, device: torch.device) -> torch.Tensor:
    """Distinct slots in disorder, some tokens outside: before the cache and behind it."""
    slot_mapping = torch.randperm(room, device=device)[:T]
    slot_mapping[T // 2 : T // 2 + 1] = -1
    slot_mapping[T // 2 + 1 : T // 2 + 2] = room
    return slot_mapping


def rows(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Of very different sizes, with a row of zeros; bf16's values in any dtype, so that a cache
    of bf16 takes them unrounded (the interpreter cuts)."""
    x = torch.randn(*shape, device=device) * 2.0 ** torch.randint(-12, 12, shape, device=device)
    x[:1] = 0
    return x.bfloat16().to(dtype)


def assert_writes_alike(op: str, given: tuple[torch.Tensor, ...], made: Callable[[], Caches]):
    mine, theirs = made(), made()
    {"mla_write": mla_write, "kv_write": kv_write}[op](*given, *mine)
    getattr(ref, op)(*given, *theirs)
    for found, truth in zip(mine, theirs, strict=True):
        assert found is truth is None or torch.equal(bits(found), bits(truth))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float32, E4M3])
@pytest.mark.parametrize(("T", "L", "R"), [(0, 64, 16), (1, 512, 64), (9, 512, 64), (5, 100, 24)])
def test_mla_write(
    T: int, L: int, R: int, cache_dtype: torch.dtype, dtype: torch.dtype, device: torch.device
) -> None:
    wide = rows(T, L + R, dtype=dtype, device=device)  # kv_a_proj's output
    eight = cache_dtype == E4M3

    def made() -> Caches:
        scale = poison(4, 16, dtype=torch.float32, device=device) if eight else None
        latent = poison(4, 16, L, dtype=cache_dtype, device=device)
        return [
            latent,
            poison(4, 16, R, dtype=BF16 if eight else cache_dtype, device=device),
            scale,
        ]

    given = (wide[:, :L], wide[:, L:], slots_of(T, 4 * 16, device).int())
    assert_writes_alike("mla_write", given, made)


@pytest.mark.parametrize("eight", [False, True])
@pytest.mark.parametrize(("T", "KVH", "D"), [(1, 1, 64), (3, 5, 96), (2, 40, 256)])
def test_kv_write(T: int, KVH: int, D: int, eight: bool, device: torch.device) -> None:
    k, v = (rows(T, KVH, D, dtype=torch.bfloat16, device=device) for _ in range(2))

    def made() -> Caches:
        dtype = E4M3 if eight else torch.bfloat16
        caches = [poison(3, 8, KVH, D, dtype=dtype, device=device) for _ in range(2)]
        scales = [poison(3, 8, KVH, dtype=torch.float32, device=device) for _ in range(2)]
        return [*caches, *(scales if eight else (None, None))]

    assert_writes_alike("kv_write", (k, v, slots_of(T, 3 * 8, device)), made)


def test_what_is_no_number_has_no_part_in_a_scale(device: torch.device) -> None:
    """NaN is kept, and a row has no scale of 0 or NaN, which would make NaN of numbers."""
    tiny = 5e-43  # its 448th part rounds to the least number above 0, or to 0
    kinds = ([torch.nan, 3.0, -1.0], [torch.nan] * 3, [torch.inf, 1.0, 0.0], [tiny, 0.0, -tiny])
    for D in (3, 4):  # as it is, and padded in the kernel
        x = torch.tensor([[*row, *row[:1]][:D] for row in kinds], device=device)
        slot_mapping, kept = torch.arange(4, device=device), []
        for write in (mla_write, ref.mla_write):
            caches = [poison(1, 4, D, dtype=E4M3, device=device)]
            caches += [torch.zeros(1, 4, n, device=device).squeeze(-1) for n in (D, 1)]
            write(x, x, slot_mapping, *caches)
            kept.append(caches)
        for found, truth in zip(*kept, strict=True):
            torch.testing.assert_close(found.float(), truth.float(), rtol=0, atol=0, equal_nan=True)
        assert torch.equal(kept[0][0][0, [0, 1, 3]].isnan(), x[[0, 1, 3]].isnan())
        assert kept[0][2][0, :3].tolist() == [(torch.tensor(3.0) / 448).item(), 1.0, torch.inf]


REFUSED: list[tuple[str, Callable[[torch.device], dict[str, torch.Tensor]]]] = [
    ("float slots", lambda d: {"slot_mapping": torch.zeros(2, device=d)}),
    ("slots with gaps", lambda d: {"slot_mapping": torch.arange(4, device=d)[::2]}),
    ("a cache of another width", lambda d: {"latent_cache": torch.zeros(1, 8, 65, device=d)}),
    ("a cache of other pages", lambda d: {"rope_cache": torch.zeros(2, 4, 16, device=d)}),
    ("E4M3 without scales", lambda d: {"latent_cache": torch.zeros(1, 8, 64, device=d).to(E4M3)}),
    ("scales without E4M3", lambda d: {"latent_scale": torch.zeros(1, 8, device=d)}),
    (
        "rows of nothing",
        lambda d: {
            "rope": torch.zeros(2, 0, device=d),
            "rope_cache": torch.zeros(1, 8, 0, device=d),
        },
    ),
]


@pytest.mark.parametrize("other", [row[1] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_refused(other: Callable[[Any], dict[str, torch.Tensor]], device: torch.device) -> None:
    given: dict[str, Any] = {
        "latent": torch.zeros(2, 64, device=device),
        "rope": torch.zeros(2, 16, device=device),
        "slot_mapping": torch.arange(2, device=device),
        "latent_cache": torch.zeros(1, 8, 64, device=device),
        "rope_cache": torch.zeros(1, 8, 16, device=device),
    }
    mla_write(**given)
    with pytest.raises(PykernelsError):
        mla_write(**given | other(device))


COMPILES = [
    (
        "mla, e4m3",
        lambda: mla_write(
            meta(8, 512),
            meta(8, 64),
            meta(8, dtype=torch.int64),
            meta(9, 64, 512, dtype=E4M3),
            meta(9, 64, 64),
            meta(9, 64, dtype=torch.float32),
        ),
    ),
    (
        "gqa, bf16",
        lambda: kv_write(
            meta(8, 8, 128),
            meta(8, 8, 128),
            meta(8, dtype=torch.int32),
            meta(9, 64, 8, 128),
            meta(9, 64, 8, 128),
        ),
    ),
]
