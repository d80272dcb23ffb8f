"""Attention over the paged cache: grouped queries, and MLA's absorbed form, by one kernel.

Twin of ``ref.gqa_decode``, ``ref.gqa_prefill`` and ``ref.mla_decode``, for any mix of their tokens
in a step. MLA is one KV head whose values are the first D_V numbers of its keys' own rows. The
scores, the softmax and the sums are float32, of queries in float32 and a cache in bfloat16, or in
E4M3 with scales (``ref.kv_write``): these multiply the scores, and the numerators for the values.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

from ...target import detect
from ..vectors import width
from .args import (
    COMBINE_BYTES,
    COMBINE_ROWS,
    FEW_SPLITS,
    ITEM_BYTES,
    SHORT_SPLIT_KEYS,
    SPLIT_KEYS,
    SPLIT_TOKENS,
)
from .combine import make_combine
from .items import make_setup, partial_bytes
from .layout import Layout
from .run import make_run

_SHORT_IN_SPLIT = SPLIT_KEYS // SHORT_SPLIT_KEYS


@dataclass(frozen=True)
class AttentionWorkspace:
    """What a call must own for the steps that it is used for: bytes, and records."""

    items_capacity: int
    combines_capacity: int
    partial_bytes: int

    @property
    def items_bytes(self) -> int:
        return self.items_capacity * ITEM_BYTES

    @property
    def combines_bytes(self) -> int:
        return self.combines_capacity * COMBINE_BYTES


@dataclass(frozen=True)
class AttentionKernel:
    """Two ops on one ``ATTENTION`` record, the second after the first; each task a ``jit.TASK``.

    Attributes:
        setup: writes the work list from the step's tokens; returns the tasks of ``run``, negative
            where the call's memory is too small (``workspace``).
        run: an item of the list: rows of the output, or a split's part of them.
        combine_setup: returns the tasks of ``combine``; none where nothing was split.
        combine: a few rows of the output from their splits.
        scratch_bytes: of a worker.
    """

    layout: Layout
    setup: Any
    run: Any
    combine_setup: Any
    combine: Any
    scratch_bytes: int

    def workspace(self, NH: int, KVH: int, T: int, S: int, keys: int) -> AttentionWorkspace:
        """For steps of at most T tokens of S sequences, which have ``keys`` keys together."""
        group = NH // KVH
        chunks = -(-group // self.layout.rows)
        heads = -(-group // chunks)
        tokens = self.layout.rows // heads
        few = min(tokens, SPLIT_TOKENS)
        whole = T // tokens + S  # tiles of a chunk of heads, of sequences that are not split,
        short = min(T, SPLIT_TOKENS * S) // few + S  # of those that are,
        most = -(-SPLIT_TOKENS // few)  # and of one of these
        ranges = keys // SPLIT_KEYS
        splits = min(most * (ranges + 2 * S), short * (ranges + 2))
        most_short = min(-(-FEW_SPLITS // (KVH * chunks)), ranges + 1) * _SHORT_IN_SPLIT + 2
        # Short splits: of sequences with one token each, or of a step of few tokens.
        shorter = max(min(S, T), min(SPLIT_TOKENS, T)) * most_short
        cuts = 2 * min(S, SPLIT_TOKENS)  # tiles more, where tokens side by side are split unlike
        rows = few * heads
        return AttentionWorkspace(
            items_capacity=KVH * chunks * (whole + splits + shorter + cuts),
            combines_capacity=KVH * chunks * (short + cuts) * -(-rows // COMBINE_ROWS),
            partial_bytes=KVH
            * chunks
            * (
                splits * int(partial_bytes(rows, self.layout.D_V))
                + shorter * int(partial_bytes(heads, self.layout.D_V))
            ),
        )


@functools.cache
def make_attention(D_K: int, D_V: int, N: int | None = None, codes: int = 0) -> AttentionKernel:
    """Compiles attention of heads of D_K (keys) and D_V (values) numbers.

    Args:
        N: floats of a vector, 8 or 16; None for what suits this CPU.
        codes: numbers of a key that are E4M3, as all of its value are then: D_K, or with MLA the L
            of the latent, behind which keys are bfloat16; 0: all is bfloat16. NaN in E4M3 is read
            as 480.

    Raises:
        PykernelsError: D_K, D_V or ``codes`` is no multiple of 16.

    Source: FlashAttention-2 (arXiv 2307.08691), split-KV as in FlashDecoding; DeepSeek-V2
    (arXiv 2405.04434), appendix C, for the absorbed form.
    """
    plain = Layout(D_K, D_V, N or width(detect()))
    layout = replace(plain, codes=codes)
    combine_setup, combine = make_combine(plain)  # which meets no key
    return AttentionKernel(
        layout,
        make_setup(D_V, layout.rows),
        make_run(layout),
        combine_setup,
        combine,
        layout.offsets["end"],
    )
