"""Which part of a layer's experts each GPU has that shares a prompt with others."""

from __future__ import annotations

import math
from collections.abc import Mapping

STEPS = 2
"""Shares are so many steps apart for each factor of two: links alike have equal ones, although no
two measurements are, and a text does not change its bits from one load to the next."""


def by_links(links: Mapping[str, float]) -> dict[str, float]:
    """Shares in proportion to the rates of links, of which the slowest would else be waited for;
    none where all are alike.

    Args:
        links: by GPU, bytes a second.
    """
    fastest = max(links.values(), default=0.0)
    steps = {gpu: round(STEPS * math.log2(fastest / rate)) for gpu, rate in links.items()}
    return {gpu: 2 ** (-n / STEPS) for gpu, n in steps.items()} if any(steps.values()) else {}


def described(shares: Mapping[str, float]) -> str:
    """One clause that says which part of the experts each GPU has."""
    parts = (f"{gpu} {part / sum(shares.values()):.0%}" for gpu, part in shares.items())
    return f"of the experts {', '.join(parts)}"
