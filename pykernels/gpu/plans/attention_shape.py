"""What a launch plan of attention is chosen by."""

from __future__ import annotations

from typing import NamedTuple


class AttentionShape(NamedTuple):
    """Sizes of one call. A tuned plan needs equal first fields and nearly equal ``NEAR`` ones.

    Attributes:
        head_dim, rope, value_dim: of a head's keys, of their rotated part where it is stored apart
            (else 0), and of its values. MLA's decode: the latent, its rotated part, the latent.
        page: tokens of one, 0 without pages.
        window: of sliding-window attention, 0 for none.
        queries: new tokens of a sequence, at most.
        context: keys of a sequence that there is room for; of a decode with a window at most
            those within it, of a prefill without pages the average.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rope: int
    value_dim: int
    page: int
    window: int
    batch: int
    queries: int
    context: int


NEAR = ("batch", "queries", "context")
SAME = AttentionShape._fields[: -len(NEAR)]
