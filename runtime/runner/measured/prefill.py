"""What steps of prompts cost by each way of their experts, measured on a runner's own steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from statistics import median

import torch

from ...kv_cache.layout import PAGE
from ...planning.prefill_rates import MEASURED, Rates, balanced_share
from ...program.step_inputs import HAS_STATE, HEAD_LENGTHS, IS_PROMPT, STATE_SLOTS
from ..paged_runner import Executable

_ROUNDS, _ENOUGH_S = 3, 1.0
"""Steps that are timed, or as many as take so many seconds."""
_BY_TOKEN = ("tokens", "positions", "slot_mapping", "sequences")
_BY_SEQUENCE = {
    "query_starts": False,
    "query_lengths": True,
    "lengths": True,
    HEAD_LENGTHS: True,
    **dict.fromkeys(("page_rows", STATE_SLOTS, HAS_STATE), False),
}
"""Whether it is the number of tokens."""
_CHANGED = (*_BY_TOKEN, IS_PROMPT, *_BY_SEQUENCE, "page_table")


def step_seconds(
    step: Executable,
    arrays: Mapping[str, torch.Tensor],
    sizes: torch.Tensor,
    tokens: int,
    vocabulary: int,
) -> float:
    """Seconds of a step of one prompt of random tokens, the median of a few.

    Its keys, values and states go to the cache's first places, which nobody reads before they are
    written.

    Args:
        arrays: inputs of the step, which are as before when it returns; ``sizes``: of it.
    """
    before = {name: arrays[name].clone() for name in _CHANGED}
    at = torch.arange(tokens, dtype=torch.int64, device="cpu")
    pages = -(-tokens // PAGE)
    random = torch.randint(0, vocabulary, (tokens,), dtype=torch.int64, device="cpu")
    for name, values in zip(_BY_TOKEN, (random, at, at, torch.zeros_like(at)), strict=True):
        arrays[name][:tokens] = values
    arrays[IS_PROMPT][:tokens] = 1
    for name, counts in _BY_SEQUENCE.items():
        arrays[name][0] = tokens if counts else 0
    arrays["page_table"][0, :pages] = at[:pages]
    sizes[0], sizes[1], sizes[2] = tokens, 1, 0
    times = list[float]()
    while len(times) < 2 or (len(times) <= _ROUNDS and sum(times) < _ENOUGH_S):
        start = time.perf_counter()
        step.run()
        times.append(time.perf_counter() - start)
    for name, array in before.items():
        arrays[name].copy_(array)
    return median(times[1:])


def measured_rates(
    step: Callable[[int, float], Executable],
    arrays: Mapping[str, torch.Tensor],
    sizes: torch.Tensor,
    most: int,
    vocabulary: int,
    stream_s: float,
    split: bool,
) -> Rates:
    """From steps with the experts on the CPU, all or a part, and what is known of the link.

    Args:
        step: makes one of so many tokens, in which that share of the experts crosses, with these
            ``arrays`` and ``sizes``.
        most: tokens of a step.
        stream_s: see ``Rates``; ``split``: whether steps can be split.
    """

    def timed(tokens: int, share: float) -> float:
        return step_seconds(step(tokens, share), arrays, sizes, tokens, vocabulary)

    measured = sorted({min(tokens, most) for tokens in MEASURED})
    rates = Rates(stream_s, tuple((T, timed(T, 0.0)) for T in measured))
    if not split:
        return rates
    found = [balanced_share(cpu_s, stream_s, partial(timed, T)) for T, cpu_s in rates.cpu]
    return replace(
        rates,
        split=tuple((T, seconds) for T, (_, seconds) in zip(measured, found, strict=True)),
        shares=tuple((T, share) for T, (share, _) in zip(measured, found, strict=True)),
    )
