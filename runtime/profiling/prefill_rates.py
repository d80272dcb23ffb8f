"""By which way the experts of a prompt are faster: on the CPU, on a GPU to which they cross, or on
both."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import median

import torch

from ..devices.runner import Executable
from ..kv_cache.layout import PAGE

MEASURED = 64, 256
"""Tokens of the two steps that say what the CPU takes."""
_ROUNDS = 3
_BY_TOKEN = ("tokens", "positions", "slot_mapping", "sequences")
_BY_SEQUENCE = {"query_starts": False, "page_rows": False, "query_lengths": True, "lengths": True}
"""Whether it is the number of tokens."""
_CHANGED = (*_BY_TOKEN, *_BY_SEQUENCE, "page_table")


SLOWDOWN = 1.25
"""What the CPU's experts take beside a link that reads main memory too, about."""
_GAIN = 0.85
"""A split is chosen where it takes no more of the next best way's time: it keeps both devices busy,
and the rates are estimates."""


@dataclass(frozen=True)
class Rates:
    """What a step costs by each way.

    Attributes:
        stream_s: seconds in which all streamed experts cross the link once.
        cpu_s, cpu_token_s: seconds of a step with the experts on the CPU, and of each token of it.
        slowdown: of the CPU while experts cross.
    """

    stream_s: float
    cpu_s: float
    cpu_token_s: float
    slowdown: float = SLOWDOWN

    @classmethod
    def measured(
        cls, nbytes: int, link: float, few: tuple[int, float], many: tuple[int, float]
    ) -> Rates:
        """From bytes of experts and bytes a second of the link, and from two steps on the CPU:
        (tokens, seconds) each."""
        slope = max(0.0, (many[1] - few[1]) / max(1, many[0] - few[0]))
        return cls(nbytes / link, max(0.0, many[1] - slope * many[0]), slope)

    def share(self, tokens: int) -> float:
        """Share of the experts with which the link takes as long as the CPU for the others."""
        beside = self.slowdown * self.seconds("cpu", tokens)
        return beside / (beside + self.stream_s)

    def seconds(self, way: str, tokens: int) -> float:
        """Of a step of so many tokens by "cpu", "split" or "stream"."""
        if way == "stream":
            return self.stream_s
        if way == "split":
            return self.stream_s * self.share(tokens)
        return self.cpu_s + tokens * self.cpu_token_s

    def with_split(self, tokens: int, share: float, seconds: float) -> Rates:
        """With the slowdown of a step that was split, as it took so many ``seconds``: no less than
        none, and no more than double."""
        others = (1 - share) * self.seconds("cpu", tokens)
        return replace(self, slowdown=min(2.0, max(1.0, seconds / others)))


def choose(tokens: int, rates: Rates, split: bool = True) -> str:
    """ "cpu", "split" or "stream": by which way a step of so many tokens takes the least time.

    Args:
        split: whether steps can be split.
    """
    best = min(("cpu", "stream"), key=lambda way: rates.seconds(way, tokens))
    limit = _GAIN * rates.seconds(best, tokens)
    return "split" if split and rates.seconds("split", tokens) < limit else best


def turning_point(rates: Rates, most: int) -> int:
    """The most tokens up to ``most`` of a step that the CPU computes sooner than its experts cross;
    0: there is none."""
    if not rates.cpu_token_s:
        return 0 if choose(1, rates, split=False) == "stream" else most
    tokens = (rates.stream_s - rates.cpu_s) / rates.cpu_token_s
    return max(0, min(most, math.floor(tokens)))


def split_range(rates: Rates, most: int) -> range:
    """The sizes of steps, up to ``most`` tokens, that should be split; it may be empty. Rates of
    fewer tokens than were measured are not known."""
    sizes = range(MEASURED[0], most + 1)
    fitting = [tokens for tokens in sizes if choose(tokens, rates) == "split"]
    return range(fitting[0], fitting[-1] + 1) if fitting else range(0)


def step_seconds(
    step: Executable,
    arrays: Mapping[str, torch.Tensor],
    sizes: torch.Tensor,
    tokens: int,
    vocabulary: int,
) -> float:
    """Seconds of a step of one prompt of random tokens, the median of a few.

    Its keys and values go to the cache's first places, which nobody reads before they are written.

    Args:
        arrays: inputs of the step, which are as before when it returns; ``sizes``: of it.
    """
    before = {name: arrays[name].clone() for name in _CHANGED}
    at = torch.arange(tokens, dtype=torch.int64, device="cpu")
    pages = -(-tokens // PAGE)
    random = torch.randint(0, vocabulary, (tokens,), dtype=torch.int64, device="cpu")
    for name, values in zip(_BY_TOKEN, (random, at, at, torch.zeros_like(at)), strict=True):
        arrays[name][:tokens] = values
    for name, counts in _BY_SEQUENCE.items():
        arrays[name][0] = tokens if counts else 0
    arrays["page_table"][0, :pages] = at[:pages]
    sizes[0], sizes[1], sizes[2] = tokens, 1, 0
    times = list[float]()
    for _ in range(1 + _ROUNDS):
        start = time.perf_counter()
        step.run()
        times.append(time.perf_counter() - start)
    for name, array in before.items():
        arrays[name].copy_(array)
    return median(times[1:])


def measured_rates(
    step: Callable[[int], Executable],
    arrays: Mapping[str, torch.Tensor],
    sizes: torch.Tensor,
    most: int,
    vocabulary: int,
    nbytes: int,
    link: float,
) -> Rates:
    """From two steps with the experts on the CPU, and what is known of the link.

    Args:
        step: makes one of so many tokens, with these ``arrays`` and ``sizes``.
        most: tokens of a step.
        nbytes: of the experts that would cross; ``link``: bytes a second.
    """
    few, many = (
        (T, step_seconds(step(T), arrays, sizes, T, vocabulary))
        for T in (min(T, most) for T in MEASURED)
    )
    return Rates.measured(nbytes, link, few, many)
