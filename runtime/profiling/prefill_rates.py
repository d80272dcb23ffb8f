"""By which way the experts of a prompt are faster: on the CPU, or on a GPU to which they cross."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Rates:
    """What a step costs by either way.

    Attributes:
        stream_s: seconds in which all streamed experts cross the link once.
        cpu_s, cpu_token_s: seconds of a step with the experts on the CPU, and of each token of it.
    """

    stream_s: float
    cpu_s: float
    cpu_token_s: float

    @classmethod
    def measured(
        cls, nbytes: int, link: float, few: tuple[int, float], many: tuple[int, float]
    ) -> Rates:
        """From bytes of experts and bytes a second of the link, and from two steps on the CPU:
        (tokens, seconds) each."""
        slope = max(0.0, (many[1] - few[1]) / max(1, many[0] - few[0]))
        return cls(nbytes / link, max(0.0, many[1] - slope * many[0]), slope)


def choose(tokens: int, rates: Rates) -> str:
    """ "stream" or "cpu": by which way a step of so many tokens takes less time."""
    by_cpu = rates.cpu_s + tokens * rates.cpu_token_s
    return "stream" if rates.stream_s < by_cpu else "cpu"


def turning_point(rates: Rates, most: int) -> int:
    """The most tokens up to ``most`` of a step that should not be streamed; 0: there is none."""
    if not rates.cpu_token_s:
        return 0 if choose(1, rates) == "stream" else most
    tokens = (rates.stream_s - rates.cpu_s) / rates.cpu_token_s
    return max(0, min(most, math.floor(tokens)))


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
