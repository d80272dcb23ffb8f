"""What attention's tasks read: the args, the work list, and where split results are combined.

A *tile* is a run of consecutive query tokens of one sequence with heads of one KV head's group: its
rows are (token, head), tokens first. An *item*, one task, is a tile and a range of keys: all that
its tokens see, or one split of ``SPLIT_KEYS``.
"""

from __future__ import annotations

from ..intrin.descriptor import descriptor

PAGE = 64
"""Tokens of a page of the cache."""
SPLIT_KEYS = 512
"""Keys of one split: 512 n to 512 (n + 1), so that sums depend on nothing but the sequence."""
SHORT_SPLIT_KEYS, FEW_SPLITS = 128, 32
"""Keys of one split where a token sees more than two such splits, and would have fewer items than
``FEW_SPLITS``: many cores have work at short contexts too. So it is of a sequence with one token in
the step, and where the step has no more than ``SPLIT_TOKENS``, as with drafts: then each token's
result is the same bits as if it were alone."""
SPLIT_TOKENS = 8
"""A sequence with more tokens in the step has tiles enough: its keys are not split."""
COMBINE_ROWS = 8
"""Rows that one task of the second op sums over the splits."""

ATTENTION, attention_at = descriptor(
    "attention",
    (
        "sizes",  # int64 [>= 1]: T tokens of this step, ...
        "sequence",  # int64 [T]: row of the page table; a sequence's tokens are contiguous
        "positions",  # int64 [T], ascending in a sequence; a token sees the keys 0 .. its position
        "page_table",  # int64 [S, page_table_stride], page numbers
        "page_table_stride",  # entries
        "tokens_from",  # sequences with fewer tokens in the step are left out,
        "tokens_to",  # and those with as many
        "q",  # float32 [T, NH, D_K]
        "q_stride",  # bytes
        "q_nope",  # of expanded attention: float32 [T, NH, nope + R], what no position turns
        "q_nope_stride",
        "w_uk",  # expand.MATRICES records
        "w_uv",
        "k",  # bfloat16 [pages, PAGE, KVH, D_K] with the strides below; or E4M3, with MLA [..., L]
        "v",  # likewise; with MLA the same address as k
        "page_bytes",
        "token_bytes",
        "k_head_bytes",
        "v_head_bytes",
        "k_scale",  # of E4M3: float32 [pages, PAGE, KVH]; with MLA both are one
        "v_scale",
        "rope",  # of E4M3 latents: bfloat16 [pages, PAGE, D_K - L], the part without a scale
        "NH",
        "KVH",
        "scale",  # of the scores, bits of a float32
        "window",  # a token sees the last so many keys up to its own; 0: all
        "sinks",  # float32 [NH], one more logit each in the softmax's denominator; 0: none
        "out",  # float32 [T, NH, D_V]
        "out_stride",  # bytes
        "items",  # ITEM records, the work list
        "items_capacity",
        "combines",  # COMBINE records
        "combines_capacity",
        "combine_count",  # written by setup
        "partial",  # results of splits, 64-byte aligned
        "partial_bytes",
        "scratch",  # of worker 0, 64-byte aligned; the next one's is scratch_stride on
        "scratch_stride",  # bytes, at least Attention.scratch_bytes
    ),
)
"""The arguments of both ops, ``AttentionKernel.setup, run`` and then ``combine_setup, combine``."""

ITEM, item_at = descriptor(
    "attention_item",
    (
        "token",  # the first one
        "tokens",
        "kv_head",
        "head",  # the first one, of NH
        "heads",
        "start",  # first key, a multiple of PAGE
        "end",  # behind the last key
        "partial",  # address of its result: m, l float32 [rows], o [rows, D_V]; 0: goes to out
    ),
)

COMBINE, combine_at = descriptor(
    "attention_combine",
    (
        "item",  # of the first split, whose partial result the others' follow
        "splits",
        "row",  # the first one
        "rows",
    ),
)

ITEM_BYTES, COMBINE_BYTES = ITEM.itemsize, COMBINE.itemsize
