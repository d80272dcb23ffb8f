"""Attention in parts, merged, against torch's over all keys at once; stripes of a step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from pykernels.ref.partial_attention import merge_attention, merge_sinks, partial_attention
from runtime.passes.shard.stripes import (
    BY_SEQUENCE,
    deal,
    of_all,
    of_rank,
    places,
    stripe_tokens,
)


def test_parts_merge_to_the_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(5, 4, 8, generator=generator)
    k, v = (torch.randn(11, 2, 8, generator=generator) for _ in "kv")
    mask = torch.rand(5, 11, generator=generator) < 0.5
    mask[0] = False  # sees no key
    mask[1, :4] = False  # none in the first part
    cuts = ((0, 4), (4, 7), (7, 11))
    parts = [partial_attention(q, k[a:b], v[a:b], mask[:, a:b], 0.3) for a, b in cuts]
    out, lse = merge_attention(parts[0], merge_attention(parts[1], parts[2]))
    heads = [x.transpose(0, 1)[None] for x in (q, k, v)]
    truth = scaled_dot_product_attention(*heads, attn_mask=mask, scale=0.3, enable_gqa=True)
    truth = truth[0].transpose(0, 1)
    torch.testing.assert_close(out[1:], truth[1:])
    assert not out[0].any() and lse[0].isneginf().all()


def test_a_sink_is_one_more_key_without_a_value() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(n, 2, 8, generator=generator) for n in (3, 6, 6))
    sinks, mask = torch.tensor([0.5, -1.0]), torch.ones(3, 6, dtype=torch.bool)
    out, _ = merge_sinks(partial_attention(q, k, v, mask, 0.4), sinks)
    scores = torch.einsum("qhd,khd->hqk", q, k) * 0.4
    scores = torch.cat([scores, sinks.view(2, 1, 1).expand(-1, 3, 1)], -1)
    p = scores.softmax(-1)[..., :6]
    torch.testing.assert_close(out, torch.einsum("hqk,khd->qhd", p, v))


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("T", [1, 7, 48, 50])
def test_every_token_is_in_one_stripe(T: int, ranks: int) -> None:
    room, numbers = stripe_tokens(T, ranks), np.arange(T, dtype=np.int64)
    own = np.zeros(ranks * room, np.int64)
    deal({"slot_mapping": numbers}, ranks, T, 0, 0, room, {of_all("slot_mapping"): own})
    assert own[places(numbers, T, ranks, room)].tolist() == list(range(T))
    assert sum(own >= 0) == T
    if T % (2 * ranks) == 0:  # all ranks have as many pairs of a query and a key
        assert len(set((own.reshape(ranks, room) + 1).sum(1).tolist())) == 1


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_ranks_tokens_are_pieces_of_sequences(ranks: int) -> None:
    """Which have the keys up to their last token."""
    rng = np.random.default_rng(ranks)
    for S in (1, 2, 5):
        counts, before = rng.integers(1, 20, S), rng.integers(0, 9, S)
        T, rows = int(counts.sum()), rng.permutation(8)[:S]
        starts, lengths = np.cumsum(counts) - counts, before + counts
        step = {
            **dict(zip(BY_SEQUENCE, (starts, counts, lengths, rows), strict=True)),
            "sequences": np.repeat(rows, counts),
            "positions": np.concatenate(
                [np.arange(a, b) for a, b in zip(before, lengths, strict=True)]
            ),
        }
        room = stripe_tokens(T + 5, ranks)
        for rank in range(ranks):
            names = {of_rank(rank, name): room for name in ("sequences", "positions")}
            names |= {of_rank(rank, name): S + 1 for name in BY_SEQUENCE}
            out = {name: np.full(n, 99) for name, n in names.items()}
            deal(step, ranks, T, S, 0, room, out)
            positions, sequences = np.zeros(room, np.int64), np.full(room, -1)
            pieces = zip(*(out[of_rank(rank, name)] for name in BY_SEQUENCE), strict=True)
            for start, count, keys, row in pieces:
                positions[start : start + count] = np.arange(keys - count, keys)
                sequences[start : start + count] = np.where(count, row, -1)
            assert out[of_rank(rank, "sequences")].tolist() == sequences.tolist()
            assert out[of_rank(rank, "positions")].tolist() == positions.tolist()
