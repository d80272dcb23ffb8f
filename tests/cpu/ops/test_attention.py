"""Attention by a call, against the reference and torch's own, on sizes that other tests compile."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pykernels import cpu, ref
from pykernels.errors import PykernelsError
from pykernels.ref.kv_write import quantize_rows
from pykernels.shapes import Ragged
from pykernels.testing import assert_close

BOUND = 2e-6
NH, KVH, D, L, R, P = 8, 2, 16, 32, 16, 24
TABLE = torch.arange(P).flip(0).view(2, P // 2).int()
LENGTHS = torch.tensor([700, 65], dtype=torch.int32)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def cache() -> tuple[torch.Tensor, torch.Tensor]:
    k, v = randn(2, P, 64, KVH, D).bfloat16()
    return k, v


def test_decode_is_torchs_attention() -> None:
    k, v = cache()
    q = randn(2, NH, D)
    out = cpu.gqa_decode(q, k, v, TABLE, LENGTHS, scale=0.3)
    for b, length in enumerate(LENGTHS.tolist()):
        keys, values = (x[TABLE[b].long()].flatten(0, 1)[:length].double() for x in (k, v))
        truth = F.scaled_dot_product_attention(
            q[b, :, None].double(),
            keys.transpose(0, 1),
            values.transpose(0, 1),
            scale=0.3,
            enable_gqa=True,
        )
        assert_close(out[b], truth[:, 0], BOUND)


OPTIONS: list[dict[str, Any]] = [{}, {"window": 100}, {"sinks": randn(NH)}]


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "window", "sinks"])
def test_decode_and_prefill(options: dict[str, Any]) -> None:
    k, v = cache()
    q = randn(2, 3, NH, D)
    out = cpu.gqa_decode(q, k, v, TABLE, LENGTHS, scale=0.3, **options)
    truth = ref.gqa_decode(q, k, v, TABLE, LENGTHS, scale=0.3, dtype=torch.float64, **options)
    assert_close(out, truth, BOUND)
    # The second sequence lies first; rows 0 and 50 are padding.
    batch = Ragged(
        q_starts=torch.tensor([11, 1], dtype=torch.int32),
        q_lengths=torch.tensor([39, 10], dtype=torch.int32),
        k_lengths=LENGTHS,
        max_queries=39,
        page_table=TABLE,
    )
    rows = randn(51, NH, D)
    out = cpu.gqa_prefill(rows, k, v, batch, scale=0.3, **options)
    truth = ref.gqa_prefill(rows, k, v, batch, scale=0.3, dtype=torch.float64, **options)
    assert_close(out, truth, BOUND)


def test_tokens_without_a_key_and_no_tokens() -> None:
    k, v = cache()
    q, lengths = randn(2, 3, NH, D), torch.tensor([0, 2])
    out = cpu.gqa_decode(q, k, v, TABLE, lengths, scale=0.3)
    assert_close(out, ref.gqa_decode(q, k, v, TABLE, lengths, scale=0.3), BOUND)
    assert cpu.gqa_decode(q[:0], k, v, TABLE[:0], lengths[:0], scale=0.3).shape == (0, 3, NH, D)


def test_an_e4m3_cache() -> None:
    (k, k_scale), (v, v_scale) = (quantize_rows(x) for x in cache())
    q = randn(2, NH, D)
    given = {"scale": 0.3, "k_scale": k_scale, "v_scale": v_scale}
    out = cpu.gqa_decode(q, k, v, TABLE, LENGTHS, **given)
    truth = ref.gqa_decode(q, k, v, TABLE, LENGTHS, dtype=torch.float64, **given)
    assert_close(out, truth, BOUND)


@pytest.mark.parametrize("coded", [False, True])
def test_mla_decode(coded: bool) -> None:
    both, scale = randn(P, 64, L + R).bfloat16(), None
    latent, rope = both[..., :L], both[..., L:]
    if coded:
        (latent, scale), rope = quantize_rows(latent), rope.contiguous()
    given = (randn(2, 6, L), randn(2, 6, R), latent, rope, TABLE, LENGTHS)
    out = cpu.mla_decode(*given, scale=0.2, latent_scale=scale)
    truth = ref.mla_decode(*given, scale=0.2, latent_scale=scale, dtype=torch.float64)
    assert_close(out, truth, BOUND)


K, V = cache()
Q = randn(2, NH, D)
LATENTS = randn(P, 64, L + R).bfloat16()


def decode(**changed: Any) -> torch.Tensor:
    given = {"q": Q, "k": K, "v": V, "page_table": TABLE, "lengths": LENGTHS, "scale": 0.3}
    return cpu.gqa_decode(**(given | changed))


REFUSED = {
    "q is torch.float32 [16]": lambda: decode(q=torch.ones(16)),
    "k is torch.float32": lambda: decode(k=K.float()),
    "v is torch.bfloat16 [23, 64, 2, 16]": lambda: decode(v=V[:-1]),
    "k has strides": lambda: decode(k=K.transpose(0, 1).contiguous().transpose(0, 1)),
    "k is torch.bfloat16 [48, 32, 2, 16]": lambda: decode(k=K.view(48, 32, 2, 16)),
    "queries of 7 heads": lambda: decode(q=Q[:, :7]),
    "queries of 8 heads of 8 for": lambda: decode(q=Q[..., :8]),
    "lengths from 65 to 769": lambda: decode(lengths=LENGTHS + torch.tensor([69, 0])),
    "lengths from -1": lambda: decode(lengths=torch.tensor([-1, 3])),
    "the page table names pages 11 to 24": lambda: decode(page_table=TABLE + 1),
    "k is torch.bfloat16 [24, 64, 2, 16]. Give float8": lambda: decode(k_scale=torch.ones(1)),
    "a window of 0": lambda: decode(window=0),
    "scale is nan": lambda: decode(scale=float("nan")),
    "latent and rope lie apart": lambda: cpu.mla_decode(
        *(randn(2, 6, L), randn(2, 6, R), LATENTS[..., :L].contiguous(), LATENTS[..., L:]),
        *(TABLE, LENGTHS),
        scale=1,
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_fit_is_refused(message: str) -> None:
    with pytest.raises(PykernelsError, match=re.escape(message)):
        REFUSED[message]()
