"""The float truth of attention itself, against torch's own: masks, scales, heads, pages."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pykernels import ref
from pykernels.shapes import Ragged

from ..caches import FP8

SCALE = 0.3
SINKS = torch.linspace(-2, 3, 6)
OPTIONS: list[dict[str, Any]] = [{}, {"window": 5}, {"softcap": 0.7}, {"window": 1}]
OF_HEADS: list[dict[str, Any]] = [*OPTIONS, {"window": 5, "softcap": 0.7, "sinks": SINKS}]


def by_torch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [Q, NH, D] behind the keys k [K, KVH, D] of v [K, KVH, DV], a head at a time; a sink as
    ``modeling_gpt_oss`` has it, one more column of scores."""
    (Q, NH, _), (K, KVH, _), heads = q.shape, k.shape, []
    mask = torch.ones(Q, K, dtype=torch.bool).tril(K - Q)
    if window:
        mask &= ~torch.ones(Q, K, dtype=torch.bool).tril(K - Q - window)
    for h in range(NH):
        own = h * KVH // NH
        given = q[:, h], k[:, own], v[:, own]
        if not softcap and sinks is None:
            y = torch.nn.functional.scaled_dot_product_attention(*given, mask, scale=SCALE)
        else:
            scores = given[0] @ given[1].T * SCALE
            scores = softcap * torch.tanh(scores / softcap) if softcap else scores
            scores = scores.masked_fill(~mask, -torch.inf)
            if sinks is not None:
                scores = torch.cat([scores, sinks[h].expand(Q, 1)], -1)
            y = scores.softmax(-1)[:, :K] @ given[2]
        heads.append(y)
    return torch.stack(heads, 1)


def paged(x: torch.Tensor, page: int, table: list[int]) -> torch.Tensor:
    """Rows [K, ...] in the pages of a table; NaN in the others."""
    whole = torch.full((len(table) * page, *x.shape[1:]), torch.nan, dtype=x.dtype)
    whole[: len(x)] = x
    cache = torch.full((max(table) + 2, page, *x.shape[1:]), torch.nan, dtype=x.dtype)
    cache[table] = whole.unflatten(0, (-1, page))
    return cache


def ints(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("options", OF_HEADS, ids=str)
def test_gqa_decode(options: dict[str, Any]) -> None:
    q = torch.randn(2, 3, 6, 8)
    k, v = (torch.randn(11, 2, 8) for _ in range(2))
    where = (ints([3, 0, 2], [3, 0, 1]), ints(11, 7))
    caches = [paged(x, 4, [3, 0, 2]) for x in (k, v)]
    found = ref.gqa_decode(q, *caches, *where, scale=SCALE, **options)
    for b, n in enumerate((11, 7)):
        torch.testing.assert_close(found[b], by_torch(q[b], k[:n], v[:n], **options))
    one = ref.gqa_decode(q[:, -1], *caches, *where, scale=SCALE, **options)
    torch.testing.assert_close(one, found[:, -1])


@pytest.mark.parametrize("options", OF_HEADS, ids=str)
def test_gqa_prefill(options: dict[str, Any]) -> None:
    q, k, v = torch.randn(12, 6, 8), torch.randn(20, 2, 8), torch.randn(20, 2, 4)
    batch = Ragged(ints(1, 6), ints(4, 6), ints(4, 11), 6, k_starts=ints(2, 9))
    found = ref.gqa_prefill(q, k, v, batch, scale=SCALE, **options)
    for rows, keys in ((slice(1, 5), slice(2, 6)), (slice(6, 12), slice(9, 20))):
        truth = by_torch(q[rows], k[keys], v[keys], **options)
        torch.testing.assert_close(found[rows], truth)
    assert not found[[0, 5]].any()  # of no sequence


def test_e4m3_caches_are_what_their_scales_make_of_them() -> None:
    """One a token and head; of MLA one a token, for the latent alone."""
    q, where = torch.randn(1, 2, 4, 16), (ints([0, 1]), ints(7))
    k, v = torch.randn(2, 2, 4, 2, 16).to(FP8)
    k_scale, v_scale = torch.rand(2, 2, 4, 2) + 0.5
    keys, values = k.float() * k_scale[..., None], v.float() * v_scale[..., None]
    options: dict[str, Any] = {"scale": SCALE, "window": 4}
    plain = ref.gqa_decode(q, keys, values, *where, **options)
    options |= {"k_scale": k_scale, "v_scale": v_scale}
    torch.testing.assert_close(ref.gqa_decode(q, k, v, *where, **options), plain)
    batch = Ragged(ints(0), ints(2), where[1], 2, page_table=where[0])
    torch.testing.assert_close(ref.gqa_prefill(q[0], k, v, batch, **options), plain[0])
    rope, q_rope = torch.randn(2, 4, 8), torch.randn(1, 2, 4, 8)
    plain = ref.mla_decode(q, q_rope, keys[:, :, 0], rope, *where, scale=SCALE)
    given, scale = (q, q_rope, k[:, :, 0], rope, *where), k_scale[..., 0]
    found = ref.mla_decode(*given, scale=SCALE, latent_scale=scale)
    torch.testing.assert_close(found, plain)


@pytest.mark.parametrize("options", [{}, {"softcap": 0.7}], ids=str)
def test_mla(options: dict[str, Any]) -> None:
    q, q_rope = torch.randn(1, 3, 4, 16), torch.randn(1, 3, 4, 8)
    latent, rope = torch.randn(7, 16), torch.randn(7, 8)
    caches = paged(latent, 4, [2, 0]), paged(rope, 4, [2, 0])
    found = ref.mla_decode(q, q_rope, *caches, ints([2, 0]), ints(7), scale=SCALE, **options)
    whole, keys = torch.cat([q, q_rope], -1), torch.cat([latent, rope], -1)
    torch.testing.assert_close(
        found[0], by_torch(whole[0], keys[:, None], latent[:, None], **options)
    )
    k, v = torch.randn(7, 4, 16), torch.randn(7, 4, 16)
    batch = Ragged(ints(0), ints(3), ints(7), 3, k_starts=ints(0))
    found = ref.mla_prefill(q[0], q_rope[0], k, rope, v, batch, scale=SCALE, **options)
    keys = torch.cat([k, rope[:, None].expand(-1, 4, -1)], -1)
    torch.testing.assert_close(found, by_torch(whole[0], keys, v, **options))
