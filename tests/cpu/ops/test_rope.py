"""Rotary embedding and the cache's new rows by a call: the queries and the bytes of the reference.

The bytes may differ by a step of the cache's dtype where a number lies between two.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from pykernels import cpu, ref
from pykernels.errors import PykernelsError
from pykernels.testing import assert_close

T, NH, KVH, D, L, R, P = 5, 3, 2, 32, 48, 16, 2
SLOT_MAPPING = torch.tensor([70, -1, 0, 128, 127])
ANGLES = ref.rope_table(torch.arange(7, 7 + T), ref.rope_frequencies(R), 0.9)
BOUND = 1e-6


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def pages(*token: int, coded: bool = False) -> list[torch.Tensor]:
    """Two caches of ones, for the call and for the reference."""
    dtype = torch.float8_e4m3fn if coded else torch.bfloat16
    return [torch.ones(P, 64, *token).to(dtype) for _ in "ab"]


def assert_same(mine: torch.Tensor, truth: torch.Tensor) -> None:
    step = 2**-3 if mine.dtype == torch.float8_e4m3fn else 2**-7
    mine, truth = mine.float(), truth.float()
    off = mine != truth
    assert bool(((mine - truth).abs() <= step * truth.abs())[off].all())
    assert float(off.float().mean()) < 0.01


def test_rope_table() -> None:
    positions, frequencies = torch.tensor([0, 1, 4000]), ref.rope_frequencies(R)
    found = cpu.rope_table(positions, frequencies, 0.9)
    angles = positions.double()[:, None] * frequencies.double()
    truth = 0.9 * torch.stack([angles.cos(), angles.sin()], 1)
    assert float((found - truth).abs().max()) < 3e-4  # angles are float32: 4000 is off by 2**-12


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("norms", ["none", "each", "all"])
def test_gqa(norms: str, interleaved: bool, coded: bool) -> None:
    qkv, given = randn(T, (NH + 2 * KVH) * D), dict[str, Any](interleaved=interleaved)
    if norms != "none":
        sizes = (1, 1) if norms == "each" else (NH, KVH)
        given |= {f"{x}_norm": randn(n * D) for x, n in zip("qk", sizes, strict=True)}
        given["v_norm"] = norms == "each"
    ks, vs = pages(KVH, D, coded=coded), pages(KVH, D, coded=coded)
    scales = [[torch.ones(P, 64, KVH) if coded else None for _ in "kv"] for _ in "ab"]
    out = cpu.gqa_rope_cache_write(qkv, ANGLES, SLOT_MAPPING, ks[0], vs[0], *scales[0], **given)
    truth = ref.gqa_rope_cache_write(qkv, ANGLES, SLOT_MAPPING, ks[1], vs[1], *scales[1], **given)
    assert_close(out, truth, BOUND)
    for mine, right in (ks, vs):
        assert_same(mine, right)
    if coded:
        for mine, right in zip(*scales, strict=True):
            torch.testing.assert_close(mine, right)


def test_gqa_of_a_wider_row() -> None:
    row, starts = randn(T, 3 + 9 * D), (3 + 2 * D, 0, 7 * D)
    ks, vs = pages(KVH, D), pages(KVH, D)
    given = {"heads": NH, "starts": starts}
    out = cpu.gqa_rope_cache_write(row, ANGLES, SLOT_MAPPING, ks[0], vs[0], **given)
    assert_close(
        out, ref.gqa_rope_cache_write(row, ANGLES, SLOT_MAPPING, ks[1], vs[1], **given), BOUND
    )
    for mine, right in (ks, vs):
        assert_same(mine, right)


@pytest.mark.parametrize("coded", [False, True])
def test_mla(coded: bool) -> None:
    q, kv, weight = randn(T, NH, R), randn(T, L + R), randn(L)
    latents, ropes = pages(L, coded=coded), pages(R)
    scales = [torch.ones(P, 64) if coded else None for _ in "ab"]
    out, truth = (
        op.mla_rope_cache_write(
            q, kv, ANGLES, SLOT_MAPPING, latents[i], ropes[i], weight, scales[i], interleaved=True
        )
        for i, op in enumerate((cpu, ref))
    )
    assert_close(out, truth, BOUND)
    assert_same(*latents)
    assert_same(*ropes)
    if coded:
        torch.testing.assert_close(*scales)


def write(**changed: Any) -> torch.Tensor:
    (k, _), (v, _) = pages(KVH, D), pages(KVH, D)
    given = {
        "qkv": randn(T, (NH + 2 * KVH) * D),
        "angles": ANGLES,
        "slot_mapping": SLOT_MAPPING,
        "k": k,
        "v": v,
    }
    return cpu.gqa_rope_cache_write(**(given | changed))


REFUSED = {
    "rows of 225 numbers": lambda: write(qkv=randn(T, 225)),
    "rows of 224 numbers for 9 heads": lambda: write(heads=9),
    "rows of 224 numbers for 3 heads": lambda: write(heads=NH, starts=(0, 96, 161)),
    "angles is torch.float32 [4, 2, 8]": lambda: write(angles=ANGLES[:4]),
    "20 angles for heads of 32": lambda: write(angles=randn(T, 2, 20)),
    "slot_mapping is torch.int64 [4]": lambda: write(slot_mapping=SLOT_MAPPING[:4]),
    "q_norm has 64 weights": lambda: write(q_norm=randn(64)),
    "a head of 24 numbers": lambda: write(k=pages(KVH, 24)[0], v=pages(KVH, 24)[0]),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_fit_is_refused(message: str) -> None:
    with pytest.raises(PykernelsError, match=re.escape(message)):
        REFUSED[message]()
