"""The merges of a byte-pair vocabulary, from the order in which its tokens are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping


def merges_of(ids: Mapping[str, int], rank: Callable[[int], float]) -> list[tuple[str, str]]:
    """Pairs of tokens whose join is a token, those with the lowest rank first.

    Args:
        ids: by token.
        rank: of a token's id; the token with the lower rank is merged first. Where one token can
            be made in several ways, the parts with the smaller ids come first, as in transformers.
    """
    pairs = []
    for token, i in ids.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                pairs.append((rank(i), ids[left], ids[right], left, right))
    pairs.sort()
    return [(left, right) for *_, left, right in pairs]
