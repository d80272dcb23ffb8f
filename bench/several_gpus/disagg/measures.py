"""Measures an engine: streams alone and beside prompts (OSDI'26, Figure 16), requests
that come at once (Figure 18), and a short request behind a long prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from statistics import mean, median

from bench.harness.timing.rows import Row
from bench.papers.osdi_text import DECODE_PROMPT

from .client import Client, Heard, Streams, together
from .requests import LEAST_DECODE, MOST_DECODE, Requests

ALONE = 48
"""Tokens of each stream before a prompt comes, which are timed too."""
LEAD_SECONDS = 0.2
"""After so long a short request comes behind a long prompt."""
WORKLOADS = {"1P": (1, 0), "1D": (0, 1), "1P+1D": (1, 1), "2D": (0, 2), "1P+2D": (1, 2)}
"""Figure 18's: how many prompts, and how many requests that decode, come at once."""


async def beside(client: Client, batch: int, sizes: Requests) -> Row:
    """``batch`` streams alone, then beside long prompts, one behind the other.

    Rates are of all streams together. The longest time between tokens is of any of them, while a
    prompt was read.
    """
    async with Streams(client, batch, sizes.context, sizes.answer) as streams:
        begin = await streams.until(8)
        arrived = await streams.until(ALONE)
        firsts: list[float] = []
        for _ in range(sizes.prompts):
            firsts.append((await client.ask(sizes.prompt, 1)).first_s)
        end = await streams.until(1)
        alone, mixed = streams.gaps(begin, arrived), streams.gaps(arrived, end)
        tokens = streams.tokens(begin, arrived), streams.tokens(arrived, end)
    return {
        "tok_s": round(tokens[0] / (arrived - begin), 2),
        **_gaps("itl", alone),
        "beside_tok_s": round(tokens[1] / (end - arrived), 2),
        **_gaps("beside_itl", mixed),
        "beside_over_alone": round(median(mixed) / median(alone), 3),
        "prompt_s": round(median(firsts), 4),
        "prompt_tok_s": round(sizes.prompt / median(firsts), 1),
    }


def _gaps(name: str, gaps: Sequence[float]) -> Row:
    """Milliseconds from token to token: the median, the mean and the longest."""
    figures = {"p50": median(gaps), "mean": mean(gaps), "max": max(gaps)}
    return {f"{name}_{key}_ms": round(1e3 * value, 3) for key, value in figures.items()}


async def workload(client: Client, name: str, decode: int, sizes: Requests) -> Row:
    """The requests of one of ``WORKLOADS``, which come at once: the time to the prompt's first
    token, that of each token of the others (means), and until all have ended.

    Args:
        decode: tokens of an answer.
    """
    count_p, count_d = WORKLOADS[name]
    found: list[tuple[list[Heard], list[Heard]]] = []
    for _ in range(sizes.repeats):
        asked = [client.ask(sizes.prompt, 1) for _ in range(count_p)]
        asked += [client.ask(DECODE_PROMPT, decode) for _ in range(count_d)]
        heard = await together([asyncio.create_task(each) for each in asked])
        found.append((heard[:count_p], heard[count_p:]))
    row: Row = {"total_s": round(median(map(_total, found)), 4)}
    if count_p:
        firsts = (mean(each.first_s for each in prompts) for prompts, _ in found)
        row["ttft_s"] = round(median(firsts), 4)
    if count_d:
        tokens = (mean(each.token_s for each in answers) for _, answers in found)
        row |= {"tpot_ms": round(1e3 * median(tokens), 3), "decode_tokens": decode}
    return row


def _total(heard: tuple[list[Heard], list[Heard]]) -> float:
    every = [*heard[0], *heard[1]]
    return max(each.ended for each in every) - min(each.submitted for each in every)


async def decode_length(client: Client, sizes: Requests, prompt_s: float) -> int:
    """Tokens of an answer that takes about as long as a prompt does."""
    if sizes.decode:
        return sizes.decode
    tried = await client.ask(DECODE_PROMPT, LEAST_DECODE)
    return max(LEAST_DECODE, min(MOST_DECODE, round(prompt_s / max(tried.token_s, 1e-9))))


async def behind(client: Client, sizes: Requests) -> Row:
    """A short request that comes while a long prompt is read and one sequence decodes: the time to
    its first token, and the longest time between two tokens of that sequence, over all repeats."""
    alone = await client.ask(sizes.short, 1)
    firsts, longs, stalls, usual = list[float](), list[float](), list[float](), list[float]()
    for _ in range(sizes.repeats):
        async with Streams(client, 1, sizes.context, sizes.answer) as streams:
            begin = await streams.until(8)
            arrived = await streams.until(ALONE)
            usual += streams.gaps(begin, arrived)
            heard = Heard(0.0)
            long = asyncio.create_task(client.ask(sizes.behind, 1, heard))
            await asyncio.wait({long}, timeout=LEAD_SECONDS)
            firsts.append((await client.ask(sizes.short, 1)).first_s)
            longs.append((await long).first_s)
            stalls.append(max(streams.gaps(arrived, await streams.until(1))))
    return {
        "short_s": round(median(firsts), 4),
        "short_most_s": round(max(firsts), 4),
        "short_alone_s": round(alone.first_s, 4),
        "long_s": round(median(longs), 4),
        "stall_s": round(max(stalls), 4),
        "itl_p50_ms": round(1e3 * median(usual), 3),
        "repeats": sizes.repeats,
    }
