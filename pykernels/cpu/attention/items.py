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
    def add_tiles(args, items, combines, partial, token, tokens, split, alone):
        """Appends the tiles of all heads; returns the new counts and end of the partials."""
        group = args.NH // args.KVH
        chunks = (group + ROWS - 1) // ROWS
        heads = (group + chunks - 1) // chunks
        end = i64(args.positions, token + tokens - 1) + 1
        low = i64(args.positions, token) - args.window + 1
        low = max(0, low) if args.window > 0 else 0
        tiles = args.KVH * chunks
        first, last, keys = 0, 1, SPLIT_KEYS
        if split:
            whole = (end - low + SPLIT_KEYS - 1) // SPLIT_KEYS
            if alone and end - low > 2 * SHORT_SPLIT_KEYS and whole * tiles < FEW_SPLITS:
                keys = SHORT_SPLIT_KEYS
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
        T, group = i64(args.sizes, 0), args.NH // args.KVH
        chunks = (group + ROWS - 1) // ROWS
        tokens = ROWS // ((group + chunks - 1) // chunks)
        items, combines, partial, t = 0, 0, args.partial, 0
        while t < T:
            last = t + 1
            while last < T and i64(args.sequence, last) == i64(args.sequence, t):
                last += 1
            first = t + (last - 1 - t) // tokens * tokens  # the longest tiles first
            takes_part = args.tokens_from <= last - t < args.tokens_to
            while takes_part and first >= t:
                items, combines, partial = add_tiles(
                    args,
                    items,
                    combines,
                    partial,
                    first,
                    min(tokens, last - first),
                    last - t <= SPLIT_TOKENS,
                    last - t == 1,
                )
                if items == FULL:
                    return FULL
                first -= tokens
            t = last
        args.combine_count = combines
        return items

    return setup
