"""Where drafts may come from, and how many a step may have."""

from __future__ import annotations

from pykernels.errors import PykernelsError

DRAFTERS = ("ngram",)
"""Where drafts come from, by name."""

AUTO = "auto"
"""From such a drafter, where they are worth it."""

AUTO_ROWS = 16
"""Drafts of all outputs in a step, at most, where they are checked if that pays."""

UNASKED_TOKENS = 8
"""Tokens of a step with drafts, at most, where nobody asked for drafts: those of which each can be
computed as if it were alone."""

MOST_DRAFTS = 256
"""Most drafts of an output in a step."""


def check_drafts(most: int, sizes: object) -> None:
    """Raises PykernelsError if a step of these sizes, those that are given, has no room for one
    sequence with so many drafts."""
    for name in ("max_num_batched_tokens", "max_num_logits"):
        limit = getattr(sizes, name)
        if limit is not None and most >= limit:
            raise PykernelsError(
                f"draft_tokens={most}: a step must have room for them and the token before them,"
                f" and {name} is {limit}",
                f"Give {limit - 1} drafts or fewer, or a larger {name}"
                if limit > 1
                else f"Give a larger {name}",
            )
