"""More clients than a server takes: it refuses the rest with 429, and everything that it accepts is
answered whole; its memory does not grow."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence

from bench.serving.process import ServerProcess

from ..client import Accepted, Outcome, Server
from ..workload import Request, prompt_of

SEATS, WAITING = 8, 16
LONGEST_PROMPT, LONGEST_ANSWER = 512, 128
_SAMPLE_SECONDS = 2.0
_GROWTH_MIB = 32.0


def run(clients: int, minutes: float, seed: int, model: Sequence[str]) -> tuple[str, bool]:
    """A line of what happened, and whether that is as it should be."""
    options = ["--max-batch", str(SEATS), "--max-waiting", str(WAITING), *model]
    with ServerProcess(options) as process:
        outcomes, memory = asyncio.run(
            outcomes_of(process.url, clients, 60 * minutes, seed, lambda: process.memory)
        )
        alive = process.alive
    whole, refused = outcomes["whole"], outcomes["429"]
    other = {kind: n for kind, n in outcomes.items() if kind not in ("whole", "429")}
    # The first quarter warms caches up: kernels, pages of the prefix tree, the allocator's pools.
    quarter = max(1, len(memory) // 4)
    before, after = statistics.median(memory[quarter : 2 * quarter]), max(memory[-quarter:])
    flat = after - before < _GROWTH_MIB
    told = (
        f"{clients} clients for {minutes:g} minutes, places for {SEATS + WAITING}: {whole} answers,"
        f" all whole; {refused} refused (429), {sum(other.values())} other"
        f"{f' {other}' if other else ''}; memory {before:.0f} MiB, at the end {after:.0f}"
    )
    return told, alive and flat and not other and whole > 0


async def outcomes_of(
    url: str, clients: int, seconds: float, seed: int, memory_of: Callable[[], float]
) -> tuple[Counter[str], list[float]]:
    """How often each outcome came, and the server's memory every few seconds."""
    outcomes: Counter[str] = Counter()
    memory: list[float] = []
    async with Server(url, None) as server:
        accepted = await server.accepted(16, seed)
        end = time.monotonic() + seconds

        async def client(number: int) -> None:
            draw = random.Random(f"{seed} {number}")
            while time.monotonic() < end:
                outcome, tokens = await _one(server, accepted, draw)
                outcomes[_kind(outcome, tokens)] += 1
                if outcome.status == 429:
                    await asyncio.sleep(draw.uniform(0.05, 0.15))

        async def watch() -> None:
            while time.monotonic() < end:
                memory.append(memory_of())
                await asyncio.sleep(_SAMPLE_SECONDS)

        await asyncio.gather(watch(), *map(client, range(clients)))
    return outcomes, memory


async def _one(server: Server, accepted: Accepted, draw: random.Random) -> tuple[Outcome, int]:
    pieces = draw.choices(accepted.vocabulary, k=draw.randint(1, LONGEST_PROMPT))
    tokens = draw.randint(1, LONGEST_ANSWER)
    request = Request(0.0, prompt_of(pieces), None)
    return await server.ask(request, accepted, tokens, time.perf_counter()), tokens


def _kind(outcome: Outcome, tokens: int) -> str:
    if outcome.status == 429:
        return "429"
    if not outcome.whole:
        return f"{outcome.status}: {outcome.error}"
    return "whole" if outcome.output_tokens == tokens else "too short"
