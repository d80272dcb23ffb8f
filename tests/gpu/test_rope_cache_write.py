"""Norms, rotary embedding and the cache's rows in one launch: as the ops make them one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pykernels import ref
from pykernels.errors import PykernelsError
from pykernels.gpu.rope import rope_table
from pykernels.gpu.rope_cache_write.gqa import gqa_rope_cache_write
from pykernels.gpu.rope_cache_write.mla import mla_rope_cache_write
from pykernels.ref.kv_write import quantize_rows

BF16, FP8, FP32 = torch.bfloat16, torch.float8_e4m3fn, torch.float32
P, PAGE = 3, 8
EPS = 1e-5


def cache(*row: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor | None]:
    """Pages full of NaN, with scales if they are E4M3."""
    pages = torch.full((P, PAGE, *row), torch.nan, device=device).to(dtype)
    scales = torch.full((P, PAGE, *row[:-1]), torch.nan, device=device)
    return [pages, scales if dtype == FP8 else None]


def assert_alike(ours: list[Any], theirs: list[Any]) -> None:
    """A cache and its scales: what is NaN in one is in the other, the rest differ by a rounding."""
    (codes, scale), (expected, expected_scale) = ours, theirs
    if scale is not None:
        torch.testing.assert_close(scale, expected_scale, rtol=1e-5, atol=0, equal_nan=True)
    step = {FP8: 2.0**-3, BF16: 2.0**-7, FP32: 1e-5}[codes.dtype]
    codes, expected = codes.float(), expected.float()
    torch.testing.assert_close(codes, expected, rtol=step, atol=1e-2 * step, equal_nan=True)


def slots_of(T: int, device: torch.device) -> torch.Tensor:
    slot_mapping = torch.randperm(P * PAGE)[:T].int()
    slot_mapping[T // 2 : T // 2 + 1] = -1
    slot_mapping[T // 2 + 1 : T // 2 + 2] = P * PAGE
    return slot_mapping.to(device)


def normed(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    """x [T, heads, D]; the weight is of a head or of all."""
    if weight is None:
        return x
    return ref.rms_norm(x.reshape(-1, len(weight)), weight, EPS, dtype=FP32)[0].view(x.shape)


def spread(qkv: torch.Tensor, *widths: int) -> tuple[torch.Tensor, tuple[int, ...]]:
    """The same rows with NaN before each part, and where the parts begin."""
    gap = qkv.new_full((len(qkv), 5), torch.nan)
    parts = [x for part in qkv.split(list(widths), 1) for x in (gap, part)]
    return torch.cat(parts, 1), (5, 10 + widths[0], 15 + widths[0] + widths[1])


GQA = [  # tokens, heads, heads of keys, D, R, norms, interleaved, cache, rows
    ((5, 6, 2, 32, 32), "head", False, BF16, FP32),
    ((3, 4, 4, 24, 16), "row", True, FP8, BF16),
    ((4, 4, 1, 64, 20), "", False, FP8, FP32),
    ((1, 40, 2, 128, 128), "q", False, FP32, BF16),
    ((0, 2, 1, 16, 16), "head", True, BF16, BF16),
]


@pytest.mark.parametrize(("sizes", "norms", "interleaved", "kind", "dtype"), GQA)
def test_gqa(
    sizes: tuple[int, ...],
    norms: str,
    interleaved: bool,
    kind: torch.dtype,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    T, NH, KVH, D, R = sizes
    qkv = torch.randn(T, (NH + 2 * KVH) * D + 8, device=device).to(dtype)[:, :-8]
    positions, frequencies = torch.randint(0, 5000, (T,)), ref.rope_frequencies(R)
    slot_mapping = slots_of(T, device)
    q_len, k_len = (NH * D, KVH * D) if norms == "row" else (D, D)
    q_norm = torch.rand(q_len, device=device).add(0.5).to(dtype) if norms else None
    k_norm = torch.rand(k_len, device=device).add(0.5) if norms in ("head", "row") else None
    angles = ref.rope_table(positions, frequencies).to(device)
    found = rope_table(positions.to(device), frequencies.to(device))
    torch.testing.assert_close(found, angles, rtol=0, atol=2e-3)  # of thousands of turns
    q, k, v = qkv.float().unflatten(1, (-1, D)).split([NH, KVH, KVH], 1)
    rotary = positions.to(device), frequencies.to(device), interleaved
    q, k = ref.rope(normed(q, q_norm), normed(k, k_norm), *rotary)
    caches = [cache(KVH, D, dtype=kind, device=device) for _ in range(10)]
    ref.kv_write(k, v, slot_mapping, *(caches[i][part] for part in (0, 1) for i in (0, 1)))
    options = {"q_norm": q_norm, "k_norm": k_norm, "eps": EPS, "interleaved": interleaved}
    apart, starts = spread(qkv, NH * D, KVH * D, KVH * D)
    for first, op, given, at in (
        (2, gqa_rope_cache_write, qkv, None),
        (4, ref.gqa_rope_cache_write, qkv, None),
        (6, gqa_rope_cache_write, apart, starts),
        (8, ref.gqa_rope_cache_write, apart, starts),
    ):
        mine = caches[first : first + 2]
        out = op(
            given,
            angles,
            slot_mapping,
            *(c[0] for c in mine),
            *(c[1] for c in mine),
            **options,
            starts=at,
            heads=NH if at else None,
        )
        assert out.shape == (T, NH, D)
        rounding = 2.0**-7 if out.dtype == BF16 else 1e-5
        torch.testing.assert_close(out.float(), q, rtol=rounding, atol=1e-5)
        for ours, theirs in zip(mine, caches, strict=False):
            assert_alike(ours, theirs)


@pytest.mark.parametrize("kind", [BF16, FP8])
def test_gqa_of_values_that_are_keys_before_their_norm(kind: torch.dtype, device: Any) -> None:
    """As Gemma 4's full layers have them."""
    T, NH, KVH, D = 3, 6, 2, 32
    qkv, slot_mapping = torch.randn(T, (NH + KVH) * D, device=device), slots_of(T, device)
    norm = torch.rand(D, device=device).add(0.5)
    angles = ref.rope_table(torch.arange(T), ref.rope_frequencies(D)).to(device)
    caches = [cache(KVH, D, dtype=kind, device=device) for _ in range(4)]
    starts = 0, NH * D, NH * D
    for op, mine in ((gqa_rope_cache_write, caches[:2]), (ref.gqa_rope_cache_write, caches[2:])):
        pages, scales = (tuple(each[part] for each in mine) for part in (0, 1))
        given = norm, norm, EPS, False, NH, starts, True
        op(qkv, angles, slot_mapping, *pages, *scales, *given)
    keys = qkv[:, NH * D :].view(T, KVH, D)
    ones = torch.ones(D, device=device)
    positions, frequencies = torch.arange(T).to(device), ref.rope_frequencies(D).to(device)
    k, _ = ref.rope(normed(keys, norm), normed(keys, norm), positions, frequencies)
    truth = [cache(KVH, D, dtype=kind, device=device) for _ in range(2)]
    ref.kv_write(
        k, normed(keys, ones), slot_mapping, *(each[part] for part in (0, 1) for each in truth)
    )
    for found in (caches[:2], caches[2:]):
        for ours, theirs in zip(found, truth, strict=True):
            assert_alike(ours, theirs)


@pytest.mark.parametrize(
    ("T", "NH", "L", "R", "interleaved", "kind", "joint"),
    [
        (5, 3, 32, 16, True, BF16, True),
        (3, 40, 48, 24, False, FP8, False),
        (1, 128, 512, 64, True, FP8, False),
        (4, 2, 64, 8, False, FP32, False),
    ],
)
def test_mla(
    T: int, NH: int, L: int, R: int, interleaved: bool, kind: torch.dtype, joint: bool, device: Any
) -> None:
    q = torch.randn(T, NH, 10 + R, device=device).to(BF16)[..., 10:]
    kv = torch.randn(T, L + R, device=device).to(BF16)
    weight, slot_mapping = torch.rand(L, device=device) + 0.5, slots_of(T, device)
    positions = torch.randint(0, 5000, (T,), device=device)
    frequencies = ref.rope_frequencies(R).to(device)
    angles = ref.rope_table(positions, frequencies)
    latent = normed(kv[:, None, :L], weight)[:, 0]
    rotary = positions, frequencies, interleaved
    turned_q, turned = ref.rope(q.float(), kv[:, None, L:].float(), *rotary)
    made = []
    for _ in "abc":
        codes, scales = cache(L, dtype=kind, device=device)
        rope, _ = cache(R, dtype=FP32 if kind == FP32 else BF16, device=device)
        if joint:
            both, _ = cache(L + R, dtype=kind, device=device)
            codes, rope = both[..., :L], both[..., L:]
        made.append((codes, rope, scales))
    ref.mla_write(latent, turned[:, 0], slot_mapping, *made[0])
    out = torch.full((T, NH, L + R), torch.nan, dtype=BF16, device=device)
    given = q, kv, angles, slot_mapping
    for (codes, rope, scales), op, options in (
        (made[1], mla_rope_cache_write, {"out": out[..., L:]}),
        (made[2], ref.mla_rope_cache_write, {}),
    ):
        found = op(*given, codes, rope, weight, scales, EPS, interleaved, **options)
        torch.testing.assert_close(found.float(), turned_q, rtol=2.0**-7, atol=1e-5)
        assert_alike([codes, scales], [made[0][0], made[0][2]])
        assert_alike([rope, None], [made[0][1], None])
    assert out[..., :L].isnan().all()


def test_what_is_no_number_has_no_part_in_a_scale(device: torch.device) -> None:
    """NaN is kept, and a row has no scale of 0 or NaN, which would make NaN of numbers."""
    tiny = 5e-43  # its 448th part rounds to the least number above 0, or to 0
    kinds = ([torch.nan, 3.0, -1.0], [torch.nan] * 3, [torch.inf, 1.0, 0.0], [tiny, 0.0, -tiny])
    for D in (4, 24):  # as it is, and padded in the kernel
        values = torch.tensor([(row * 8)[:D] for row in kinds], device=device)
        qkv = torch.cat([torch.zeros(4, 2 * D, device=device), values], 1)
        (k, k_scale), (v, v_scale) = (cache(1, D, dtype=FP8, device=device) for _ in "kv")
        angles, slot_mapping = torch.zeros(4, 2, 1, device=device), torch.arange(4, device=device)
        gqa_rope_cache_write(qkv, angles, slot_mapping, k, v, k_scale, v_scale)
        codes, scale = quantize_rows(values)
        assert v is not None and v_scale is not None
        found = v.flatten(0, 1)[:4, 0].float(), v_scale.flatten(0, 1)[:4, 0]
        for mine, truth in zip(found, (codes.float(), scale), strict=True):
            torch.testing.assert_close(mine, truth, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(found[0][[0, 1, 3]].isnan(), values[[0, 1, 3]].isnan())


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    def gqa(width: int = 64, D: int = 16, half: int = 8, starts: Any = None, **norms: int) -> None:
        k, _ = cache(1, D, dtype=BF16, device=device)
        weights = {name: torch.ones(n, device=device) for name, n in norms.items()}
        slot_mapping = torch.zeros(2, dtype=torch.int32, device=device)
        angles = torch.zeros(2, 2, half, device=device)
        gqa_rope_cache_write(
            torch.zeros(2, width, device=device),
            angles,
            slot_mapping,
            k,
            k.clone(),
            starts=starts,
            **weights,
        )

    gqa()
    for wrong in (
        {"width": 60},
        {"width": 32},
        {"half": 9},
        {"q_norm": 17},
        {"k_norm": 32},
        {"starts": (0, 32, 40)},
        {"starts": (0, 32, 56)},
    ):
        with pytest.raises(PykernelsError):
            gqa(**wrong)
            pytest.fail(f"{wrong} was taken")


def _compile_gqa(kind: torch.dtype, row: bool) -> None:
    meta = torch.device("meta")
    T, NH, KVH, D = 9, 32, 4, 128
    k, scale = cache(KVH, D, dtype=kind, device=meta)
    norms = [torch.empty(n * D if row else D, device=meta, dtype=BF16) for n in (NH, KVH)]
    gqa_rope_cache_write(
        torch.empty(T, (NH + 2 * KVH) * D, device=meta, dtype=BF16),
        torch.empty(T, 2, D // 2, device=meta),
        torch.empty(T, device=meta).int(),
        k,
        k,
        scale,
        scale,
        *norms,
    )


def _compile_mla(kind: torch.dtype) -> None:
    meta = torch.device("meta")
    (latent, scale), (rope, _) = (
        cache(n, dtype=t, device=meta) for n, t in ((512, kind), (64, BF16))
    )
    empty = torch.empty(9, 129, 576, device=meta, dtype=BF16)
    mla_rope_cache_write(
        empty[:, 1:, 512:],
        empty[:, 0],
        torch.empty(9, 2, 32, device=meta),
        torch.empty(9, device=meta).int(),
        latent,
        rope,
        torch.empty(512, device=meta),
        scale,
        interleaved=True,
    )


COMPILES = [
    ("GQA, norms of heads", lambda: _compile_gqa(BF16, False)),
    ("GQA, norms of rows, E4M3", lambda: _compile_gqa(FP8, True)),
    ("MLA", lambda: _compile_mla(BF16)),
    ("MLA, E4M3", lambda: _compile_mla(FP8)),
    (
        "angles",
        lambda: rope_table(torch.empty(9, device="meta").int(), torch.empty(32, device="meta")),
    ),
]
