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

from ...runner.route import Route

DSLP_AFTER = 300.0
"""Default of ``RoutingPolicy.dslp_after``."""


_SAID: dict[str, str] = {
    Route.STREAMED: "on the same GPU",
    Route.DSLP: "on all GPUs",
    Route.DISAGGREGATED: "on a GPU on which nothing decodes",
}


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

    def described(self, routes: Sequence[str], least: int, share: float) -> str:
        """Which prompts go which way, as one line.

        Args:
            routes: see ``route``; ``least``: of a step while requests decode.
            share: of a step's time, for which it stands back for short prompts.
        """
        apart = next((route for route in routes if route != Route.DSLP), Route.DSLP)
        way = _SAID[apart]
        if apart in routes and Route.DSLP in routes:
            way = f"{_SAID[Route.DSLP]} where nothing decodes for {self.dslp_after:g} s, else {way}"
        parts = [f"below {least} tokens beside answers"] if least > 1 else []
        parts.append(f"{'longer ones ' if parts else ''}in steps of their own, {way}")
        if share and apart != Route.DISAGGREGATED:
            parts.append(f"for up to {share:.0%} of which they wait for shorter ones")
        return f"prompts: {', '.join(parts)}"

    def route(self, routes: Sequence[str], tokens: int, least: int, idle: float) -> str:
        """The way of a step of prompts.

        Args:
            routes: those of the prefill runner, one at least.
            tokens: of the step; ``least``: see above.
            idle: seconds since a request decoded beside another one; 0 while any decodes.
        """
        if tokens < least:
            return Route.CHUNKED
        if Route.DSLP in routes and idle >= self.dslp_after:
            return Route.DSLP
        return next((route for route in routes if route != Route.DSLP), Route.DSLP)
