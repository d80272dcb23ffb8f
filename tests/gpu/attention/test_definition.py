"""The float truth of attention itself, against torch's own: masks, scales, heads, pages."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pykernels import ref
from pykernels.shapes import Ragged

from ..caches import FP8

SCALE = 0.3


def torchs(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None, softcap: float | None
) -> torch.Tensor:
    """q [Q, NH, D] behind the keys k [K, KVH, D] of v [K, KVH, DV], a head at a time."""
    (Q, NH, _), (K, KVH, _) = q.shape, k.shape
    heads = []
    for h in range(NH):
        own = h * KVH // NH
        seen = torch.ones(Q, K, dtype=torch.bool).tril(K - Q)
        if window is not None:
            seen &= ~torch.ones(Q, K, dtype=torch.bool).tril(K - Q - window)
        if softcap is None:
            y = torch.nn.functional.scaled_dot_product_attention(
                q[:, h], k[:, own], v[:, own], seen, scale=SCALE
            )
        else:
            scores = softcap * torch.tanh(q[:, h] @ k[:, own].T * SCALE / softcap)
            y = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v[:, own]
        heads.append(y)
    return torch.stack(heads, 1)


def paged(x: torch.Tensor, page: int, table: list[int]) -> torch.Tensor:
    """Rows [K, ...] in the pages of a table; whatever is not theirs is NaN."""
    whole = torch.full((len(table) * page, *x.shape[1:]), torch.nan, dtype=x.dtype)
    whole[: len(x)] = x
    cache = torch.full((max(table) + 2, page, *x.shape[1:]), torch.nan, dtype=x.dtype)
    cache[table] = whole.unflatten(0, (-1, page))
    return cache


OPTIONS = [{}, {"window": 5}, {"softcap": 0.7}, {"window": 1}]


def both(options: dict[str, Any]) -> tuple[int | None, float | None]:
    return options.get("window"), options.get("softcap")


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("S", [1, 3])
def test_gqa_decode_is_torchs_attention(S: int, options: dict[str, Any]) -> None:
    q = torch.randn(2, S, 6, 8)
    k, v = (torch.randn(11, 2, 8) for _ in range(2))
    caches = [paged(x, 4, [3, 0, 2]) for x in (k, v)]
    table = torch.tensor([[3, 0, 2], [3, 0, 1]], dtype=torch.int32)
    lengths = torch.tensor([11, 7], dtype=torch.int32)
    found = ref.gqa_decode(q, *caches, table, lengths, scale=SCALE, **options)
    for b, n in enumerate((11, 7)):
        torch.testing.assert_close(found[b], torchs(q[b], k[:n], v[:n], *both(options)))
    one = ref.gqa_decode(q[:, -1], *caches, table, lengths, scale=SCALE, **options)
    torch.testing.assert_close(one, found[:, -1])


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gqa_prefill_is_torchs_attention(options: dict[str, Any]) -> None:
    q, k = torch.randn(12, 6, 8), torch.randn(20, 2, 8)
    v = torch.randn(20, 2, 4)
    starts, rows = ([1, 6], [2, 9]), ([4, 6], [4, 11])
    columns = [torch.tensor(x, dtype=torch.int32) for x in (*starts, *rows)]
    batch = Ragged(columns[0], columns[2], columns[3], 6, k_starts=columns[1])
    found = ref.gqa_prefill(q, k, v, batch, scale=SCALE, **options)
    for at, first, queries, keys in zip(*starts, *rows, strict=True):
        mine = k[first : first + keys], v[first : first + keys]
        truth = torchs(q[at : at + queries], *mine, *both(options))
        torch.testing.assert_close(found[at : at + queries], truth)
    assert not found[[0, 5]].any()  # of no sequence


def test_e4m3_caches_are_what_their_scales_make_of_them() -> None:
    """One a token and head; of MLA one a token, for the latent alone."""
    q, table = torch.randn(1, 2, 4, 16), torch.tensor([[0, 1]], dtype=torch.int32)
    length, k, v = torch.tensor([7], dtype=torch.int32), *torch.randn(2, 2, 4, 2, 16).to(FP8)
    k_scale, v_scale = torch.rand(2, 2, 4, 2) + 0.5
    keys, values = k.float() * k_scale[..., None], v.float() * v_scale[..., None]
    where = table, length
    found = ref.gqa_decode(q, k, v, *where, scale=SCALE, k_scale=k_scale, v_scale=v_scale, window=4)
    torch.testing.assert_close(
        found, ref.gqa_decode(q, keys, values, *where, scale=SCALE, window=4)
    )
    n = torch.tensor([2], dtype=torch.int32)
    batch = Ragged(n - 2, n, length, 2, page_table=table)
    prefilled = ref.gqa_prefill(
        q[0], k, v, batch, scale=SCALE, k_scale=k_scale, v_scale=v_scale, window=4
    )
    torch.testing.assert_close(prefilled, found[0])
    rope, q_rope = torch.randn(2, 4, 8), torch.randn(1, 2, 4, 8)
    found = ref.mla_decode(
        q, q_rope, k[:, :, 0], rope, *where, scale=SCALE, latent_scale=k_scale[..., 0]
    )
    plain = ref.mla_decode(q, q_rope, keys[:, :, 0], rope, *where, scale=SCALE)
    torch.testing.assert_close(found, plain)


@pytest.mark.parametrize("softcap", [None, 0.7])
def test_mla_is_torchs_attention_over_both_parts(softcap: float | None) -> None:
    q, q_rope = torch.randn(1, 3, 4, 16), torch.randn(1, 3, 4, 8)
    latent, rope = torch.randn(7, 16), torch.randn(7, 8)
    where = torch.tensor([[2, 0]], dtype=torch.int32), torch.tensor([7], dtype=torch.int32)
    caches = paged(latent, 4, [2, 0]), paged(rope, 4, [2, 0])
    found = ref.mla_decode(q, q_rope, *caches, *where, scale=SCALE, softcap=softcap)
    whole, keys = torch.cat([q, q_rope], -1), torch.cat([latent, rope], -1)
    truth = torchs(whole[0], keys[:, None], latent[:, None], None, softcap)
    torch.testing.assert_close(found[0], truth)
    k, v = torch.randn(7, 4, 16), torch.randn(7, 4, 16)
    n = torch.tensor([3], dtype=torch.int32)
    batch = Ragged(n - 3, n, n + 4, 3, k_starts=n - 3)
    found = ref.mla_prefill(q[0], q_rope[0], k, rope, v, batch, scale=SCALE, softcap=softcap)
    keys = torch.cat([k, rope[:, None].expand(-1, 4, -1)], -1)
    torch.testing.assert_close(found, torchs(whole[0], keys, v, None, softcap))
