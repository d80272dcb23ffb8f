"""Cuts a step into items: tiles of query rows, and splits of the keys where rows are few."""

from __future__ import annotations

import functools
from typing import Any

from ..jit import inlined, task
from ..words import i64
from .args import (
    COMBINE_BYTES,
    COMBINE_ROWS,
    FEW_SPLITS,
    ITEM_BYTES,
    PAGE,
    SHORT_SPLIT_KEYS,
    SPLIT_KEYS,
    SPLIT_TOKENS,
    attention_at,
    combine_at,
    item_at,
)
from .products import padded_rows

FULL = -1
"""Status of ``setup`` where the work list or the memory of partial results is too small."""


@inlined
def partial_bytes(rows, D_V):
    """Bytes of one split's result, in whole cache lines."""
    return (padded_rows(rows) * (2 + D_V) * 4 + 63) // 64 * 64


@functools.cache
def make_setup(D_V: int, ROWS: int) -> Any:
    """Compiles ``setup``: fills the work list, returns its items; negative: ``FULL``."""

    @inlined
    def tiles_of(args):
        """(tiles of all heads for some tokens, heads of one)."""
        group = args.NH // args.KVH
        chunks = (group + ROWS - 1) // ROWS
        return args.KVH * chunks, (group + chunks - 1) // chunks

    @inlined
    def first_key(args, token):
        """The first key that a token sees."""
        return max(0, i64(args.positions, token) - args.window + 1) if args.window > 0 else 0

    @inlined
    def split_keys(args, token):
        """Keys of a split, from what a token sees alone: so its sums are the same whatever other
        tokens its sequence has in the step."""
        seen = i64(args.positions, token) + 1 - first_key(args, token)
        tiles, _ = tiles_of(args)
        whole = (seen + SPLIT_KEYS - 1) // SPLIT_KEYS
        short = seen > 2 * SHORT_SPLIT_KEYS and whole * tiles < FEW_SPLITS
        return SHORT_SPLIT_KEYS if short else SPLIT_KEYS

    @inlined
    def split_of(args, token, keys):
        """The split that has all keys of a token; -1: there are several, whose sum is rounded in
        another way than the result of one."""
        split = i64(args.positions, token) // keys
        return split if first_key(args, token) // keys == split else -1

    @inlined
    def alike(args, token, other, keys):
        """Whether a tile may have both tokens: each is then split as it would be alone."""
        same = split_of(args, token, keys) == split_of(args, other, keys)
        return same and split_keys(args, other) == keys

    @inlined
    def add_tiles(args, items, combines, partial, token, tokens, keys):
        """Appends the tiles of all heads, in splits of so many keys, 0: in none; returns the new
        counts and end of the partials."""
        group = args.NH // args.KVH
        tiles, heads = tiles_of(args)
        chunks = tiles // args.KVH
        low, end = first_key(args, token), i64(args.positions, token + tokens - 1) + 1
        first, last = 0, 1
        if keys > 0:
            first, last = low // keys, (end + keys - 1) // keys
        splits = max(1, last - first)
        tasks = (tokens * heads + COMBINE_ROWS - 1) // COMBINE_ROWS if splits > 1 else 0
        partial_size = splits * partial_bytes(tokens * heads, D_V) if splits > 1 else 0
        if (
            items + splits * tiles > args.items_capacity
            or combines + tasks * tiles > args.combines_capacity
            or partial + partial_size * tiles > args.partial + args.partial_bytes
        ):
            return FULL, combines, partial
        for tile in range(tiles):
            kv_head, head = tile // chunks, tile % chunks * heads
            some = min(heads, group - head)
            rows = tokens * some
            for s in range(splits):
                # A split's heads lie side by side in the cache: their items follow each other.
                item = item_at(args.items + (items + s * tiles + tile) * ITEM_BYTES)
                item.token, item.tokens, item.kv_head = token, tokens, kv_head
                item.head, item.heads = kv_head * group + head, some
                item.start, item.end, item.partial = low // PAGE * PAGE, end, 0
                if splits > 1:
                    item.start = max(item.start, (first + s) * keys)
                    item.end = min(end, (first + s + 1) * keys)
                    item.partial = partial + tile * partial_size + s * partial_bytes(rows, D_V)
            if splits > 1:
                for row in range(0, rows, COMBINE_ROWS):
                    combine = combine_at(args.combines + combines * COMBINE_BYTES)
                    combine.item, combine.splits = items + tile, splits
                    combine.row, combine.rows = row, min(COMBINE_ROWS, rows - row)
                    combines += 1
        return items + splits * tiles, combines, partial + partial_size * tiles

    @task(f"attention-setup-{D_V}-{ROWS}")
    def setup(address, index, worker):
        args = attention_at(address)
        T = i64(args.sizes, 0)
        _, heads = tiles_of(args)
        most = ROWS // heads  # tokens of a tile
        items, combines, partial, t = 0, 0, args.partial, 0
        while t < T:
            last = t + 1
            while last < T and i64(args.sequence, last) == i64(args.sequence, t):
                last += 1
            next_t = last if args.tokens_from <= last - t < args.tokens_to else t
            # The longest tiles first, which begin at a multiple of their tokens.
            while next_t > t:
                tokens, keys = (next_t - t - 1) % most + 1, 0
                if last - t == 1 or T <= SPLIT_TOKENS:
                    keys = split_keys(args, next_t - 1)
                    some = 1
                    while some < tokens and alike(args, next_t - 1, next_t - 1 - some, keys):
                        some += 1
                    tokens = some
                elif last - t <= SPLIT_TOKENS:
                    keys = SPLIT_KEYS
                next_t -= tokens
                items, combines, partial = add_tiles(
                    args, items, combines, partial, next_t, tokens, keys
                )
                if items == FULL:
                    return FULL
            t = last
        args.combine_count = combines
        return items

    return setup
