"""Which way a step of prompts takes (OSDI'26 3.3.2).

"Use chunked prefill for short requests (e.g., <2K tokens). For long prefill requests, if there are
no decode requests within a short window (e.g., 5 minutes), route to DSLP to maximize throughput;
otherwise, route to disaggregated SLP to preserve decode latency."

Prompts are read in the order in which they came, and requests decode together up to the engine's
``max_num_seqs``: the scheduler sees to both. A request that decodes while there is no other counts
as none: a prompt would hold up nobody's tokens, and conversations with one user take all GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...runner.batch import Route

DSLP_AFTER = 300.0
"""Default of ``RoutingPolicy.dslp_after``."""


class Choice(NamedTuple):
    """A route, and the reason for it as a clause."""

    route: str
    why: str


@dataclass(frozen=True)
class RoutingPolicy:
    """Thresholds of the choice.

    Attributes:
        chunked_below: tokens of a step below which it is chunked; None: what is measured says.
        dslp_after: seconds without decoding after which all GPUs read a prompt.
    """

    chunked_below: int | None = None
    dslp_after: float = DSLP_AFTER

    def least(self, turning_point: int, chunks: bool) -> int:
        """Tokens from which a step of prompts is no part of the main runner's steps.

        Args:
            turning_point: tokens from which another way is faster, as measured.
            chunks: whether the main runner takes prompts at all.
        """
        if not chunks:
            return 1
        return turning_point if self.chunked_below is None else self.chunked_below

    def choice(self, routes: Sequence[str], tokens: int, least: int, idle: float) -> Choice:
        """The way of a step of prompts.

        Args:
            routes: those of the prefill runner, one at least.
            tokens: of the step; ``least``: see above.
            idle: seconds since a request decoded beside another one; 0 while any decodes.
        """
        if tokens < least:
            return Choice(Route.CHUNKED, f"{tokens} tokens are fewer than {least}")
        if len(routes) == 1:
            return Choice(routes[0], "prompts have one way")
        if Route.DSLP in routes and idle >= self.dslp_after:
            return Choice(Route.DSLP, f"nothing decoded for {self.dslp_after:g} s")
        apart = next(route for route in routes if route != Route.DSLP)
        return Choice(apart, f"requests decoded {idle:.0f} s ago")
