"""Sizes of the programs of prompts with experts in main memory, by the way of their experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .prefill_rates import Rates, split_range, turning_point

HOST_BUCKETS = (8, 64, 256)
"""Buckets of steps whose experts are on the CPU, which computes nothing for padding."""
SPLIT_BUCKETS = (64, 128, 256, 512, 1024, 2048)
"""Buckets of split steps: each has another share of the experts on the GPU."""
STREAM_BUCKETS = (512, 2048, 4096, 16384, 24576, 32768, 49152)
"""Buckets of streamed steps: up to 16,384 tokens padding costs little beside what crosses, beyond
that it is computed for nothing. All experts cross once for each bucket when it is made."""


@dataclass(frozen=True)
class PromptSizes:
    """Tokens of the programs, by way.

    Attributes:
        by_cpu, split, streamed: sizes, in order.
        shares: of the experts, those that cross in a split step, by its size.
        min_tokens: tokens from which a streamed step is faster than the CPU's; it leaves the CPU to
            requests that decode meanwhile.
        alone: that number where no request decodes, so that a step may be split.
    """

    by_cpu: tuple[int, ...]
    split: tuple[int, ...]
    streamed: tuple[int, ...]
    min_tokens: int
    alone: int
    shares: tuple[float, ...] = ()

    @classmethod
    def streamed_only(cls, most: int) -> PromptSizes:
        """Every step is streamed."""
        return cls((), (), _up_to(STREAM_BUCKETS, 1, most), 1, 1)

    @classmethod
    def split_only(cls, most: int, share: Callable[[int], float]) -> PromptSizes:
        """Every step is split.

        Args:
            share: of the experts, those that cross in a step of so many tokens.
        """
        sizes = _up_to(SPLIT_BUCKETS, 1, most)
        return cls((), sizes, (), most + 1, most + 1, tuple(map(share, sizes)))

    @classmethod
    def chosen(cls, rates: Rates, most: int, may_split: bool, sequences: int = 0) -> PromptSizes:
        """Sizes by the way that takes the least time.

        Args:
            most: tokens of a step.
            sequences: sequences that may decode in the same step if it is not streamed.
        """
        turn = turning_point(rates, most)
        both = split_range(rates, most) if may_split else range(0)
        first = both.start if both else turn + 1
        last = both.stop - 1 if both else turn
        with_others = min(most, last + sequences)
        split = _up_to(SPLIT_BUCKETS, first, with_others if both else last)
        return cls(
            _up_to((*HOST_BUCKETS, *STREAM_BUCKETS), 1, first - 1 if both else with_others),
            split,
            _up_to(STREAM_BUCKETS, turn + 1, most),
            turn + 1,
            last + 1,
            tuple(map(rates.share, split)),
        )

    @property
    def not_streamed(self) -> int:
        """Tokens of the largest step that is not streamed; 0: there is none."""
        return max((*self.by_cpu, *self.split), default=0)

    def described(self, rates: Rates) -> str:
        """Which steps go which way, and what was measured, as one line."""
        ways = [f"up to {self.by_cpu[-1]} tokens on the CPU"] if self.by_cpu else []
        ways += [f"up to {self.split[-1]} on both"] if self.split else []
        ways += ["more streamed to the GPU"] if self.streamed else []
        tokens, seconds = rates.cpu[0]
        return (
            f"experts of prompts: {', '.join(ways)} (all cross in {1e3 * rates.stream_s:.0f} ms;"
            f" {tokens} tokens take the CPU {1e3 * seconds:.0f})"
        )


def _up_to(buckets: tuple[int, ...], first: int, last: int) -> tuple[int, ...]:
    """The buckets from ``first`` on, and ``last``; none if there is nothing between."""
    if last < first:
        return ()
    return tuple(sorted({*(T for T in buckets if first <= T < last), last}))
