"""Requests as their clients see them: when they were submitted, and when each token came."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from pykernels.errors import PykernelsError
from runtime.engine import Engine, SamplingParams

WARM = 4
"""First tokens of a stream, from one to the next of which no time is taken."""


@dataclass
class Heard:
    """One request.

    Attributes:
        submitted: when; ``times``: when its tokens came; seconds of one clock.
    """

    submitted: float
    times: list[float] = field(default_factory=list)

    def hear(self, tokens: int, now: float) -> None:
        """Tokens came; several at once are taken to have come evenly since the one before."""
        before = self.times[-1] if self.times else now
        self.times += [before + (now - before) * (i + 1) / tokens for i in range(tokens)]

    @property
    def first_s(self) -> float:
        """Seconds to the first token."""
        return self.times[0] - self.submitted

    @property
    def token_s(self) -> float:
        """Seconds of each token behind the first, on average (TPOT)."""
        return (self.times[-1] - self.times[0]) / max(1, len(self.times) - 1)

    @property
    def ended(self) -> float:
        """When its last token came."""
        return self.times[-1]


class Client:
    """Submits prompts of random tokens, no two of them alike, to an engine with a thread.

    Args:
        vocab_size: token ids are below.
    """

    def __init__(self, engine: Engine, vocab_size: int, seed: int = 1) -> None:
        self._engine, self._vocab = engine, vocab_size
        self._random = random.Random(seed)

    async def ask(self, prompt: int, tokens: int, into: Heard | None = None) -> Heard:
        """A prompt of ``prompt`` tokens, and an answer of ``tokens``.

        Args:
            into: is filled as tokens come.
        """
        ids = self._random.choices(range(self._vocab), k=prompt)
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=1)
        heard = Heard(0.0) if into is None else into
        heard.submitted = time.perf_counter()
        async for chunk in self._engine.astream(ids, params):
            heard.hear(len(chunk.token_ids), time.perf_counter())
        return heard


class Streams:
    """So many sequences that decode until the block ends; one that comes to its end is followed by
    another.

    Args:
        prompt: tokens in each one's cache before; ``most``: tokens of an answer.
    """

    def __init__(self, client: Client, count: int, prompt: int, most: int) -> None:
        self._client, self._prompt, self._most = client, prompt, most
        self._heard: list[list[Heard]] = [[] for _ in range(count)]
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Streams:
        self._tasks = [asyncio.create_task(self._decode(heard)) for heard in self._heard]
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with suppress(asyncio.CancelledError):
                await task

    async def _decode(self, heard: list[Heard]) -> None:
        while True:
            heard.append(Heard(0.0))
            await self._client.ask(self._prompt, self._most, heard[-1])

    async def until(self, tokens: int) -> float:
        """Waits until each has drawn so many tokens more; the time then.

        Raises:
            PykernelsError: what ended a stream.
        """
        wanted = [sum(len(each.times) for each in heard) + tokens for heard in self._heard]
        while True:
            drawn = [sum(len(each.times) for each in heard) for heard in self._heard]
            if all(own >= least for own, least in zip(drawn, wanted, strict=True)):
                return time.perf_counter()
            for task in self._tasks:
                if task.done():
                    task.result()
                    raise PykernelsError("a stream ended by itself", "Report this")
            await asyncio.sleep(0.004)

    def gaps(self, begin: float, end: float) -> list[float]:
        """Seconds from token to token, of those that came within a span."""
        return [
            after - at
            for heard in self._heard
            for each in heard
            for at, after in zip(each.times[WARM:], each.times[WARM + 1 :], strict=False)
            if begin < after <= end
        ]

    def tokens(self, begin: float, end: float) -> int:
        """How many tokens came within a span."""
        return sum(
            begin < at <= end for heard in self._heard for each in heard for at in each.times
        )


async def together(requests: Sequence[asyncio.Task[Heard]]) -> list[Heard]:
    """Waits for all of them; what ends one ends them all."""
    try:
        return list(await asyncio.gather(*requests))
    except BaseException:
        for request in requests:
            request.cancel()
        raise
