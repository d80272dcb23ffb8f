"""One way after the other: its engine, and what is measured of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from bench.harness.budget import NO_BAR, Bar, Budget
from bench.harness.timing.rows import Row, attempt, reason
from runtime.engine import Engine, EngineConfig
from runtime.kv_cache.layout import PAGE
from runtime.profiling.engine_speed import Load
from runtime.runner.paged_runner import PagedRunner

from ..ways import Way
from .client import Client
from .measures import WORKLOADS, behind, beside, decode_length, workload
from .requests import Requests

Open = Callable[[Way], PagedRunner]


@dataclass(frozen=True)
class Room(Load):
    """What an engine needs room for: sequences that decode, and two long prompts beside them.

    Attributes:
        longest: positions of the longest sequence.
    """

    longest: int = 1

    @classmethod
    def of(cls, requests: Requests) -> Room:
        """For all of them."""
        _, batches = requests.check()
        return cls(
            requests.longest,
            requests.answer,
            max(*batches, 2) + 2,
            requests.context,
            requests.positions,
        )

    def pages(self, max_num_batched_tokens: int) -> int:
        each = -(-(self.context + self.tokens) // PAGE) + 2
        return self.batch * each + 2 * (-(-self.longest // PAGE) + 2)

    def positions(self, max_num_batched_tokens: int) -> int:
        return self.longest


def plan(ways: Sequence[Way], requests: Requests) -> list[Row]:
    """Lists, for each row, the columns that name it."""
    parts, batches = requests.check()
    found: list[Row] = []
    for way in ways:
        for part in parts:
            named: Row = {"part": part, "way": way.name}
            if part == "streams":
                found += [named | {"batch": batch} for batch in batches]
            elif part == "requests":
                found += [named | {"load": load} for load in WORKLOADS]
            else:
                found.append(named)
    return found


def rows(
    ways: Sequence[Way],
    open_runner: Open,
    requests: Requests,
    budget: Budget,
    bar: Bar = NO_BAR,
) -> Iterator[Row]:
    """A row of each of ``plan``; one that fails has ``why``. None is begun that would take longer
    than there is time, as far as the one before it tells.

    Args:
        open_runner: with ``Room``.

    Raises:
        PykernelsError: what the first way's engine refuses.
    """
    for way in ways:
        if not budget.fits():
            return
        bar.say(f"{way.name}: compiling")
        try:
            with way.flagged():
                runner = open_runner(way)
                engine = Engine(runner, config=EngineConfig(**way.engine))
        except Exception as error:
            if way is ways[0]:
                raise
            yield from ({**named, "why": reason(error)} for named in plan([way], requests))
            continue
        try:
            with engine, asyncio.Runner() as loop:
                yield from _of_way(way, engine, runner, loop, requests, budget, bar)
        finally:
            runner.close()


def _of_way(
    way: Way,
    engine: Engine,
    runner: PagedRunner,
    loop: asyncio.Runner,
    requests: Requests,
    budget: Budget,
    bar: Bar,
) -> Iterator[Row]:
    client = Client(engine, runner.vocab_size)
    bar.say(f"{way.name}: warming up")
    prompt_s, decode = loop.run(_warmed(client, requests))
    took = dict[str, float]()
    for named in plan([way], requests):
        part = named["part"]
        if not budget.fits(took.get(part, prompt_s)):
            return
        bar.say(" ".join(str(value) for value in named.values()))
        begin = time.perf_counter()
        yield named | attempt(partial(_measured, loop, client, named, decode, requests))
        took[part] = time.perf_counter() - begin
        bar.advance(1)


def _measured(
    loop: asyncio.Runner, client: Client, named: Row, decode: int, requests: Requests
) -> Row:
    """The figures of a row.

    Args:
        decode: tokens of an answer that comes with a prompt.
    """
    if named["part"] == "streams":
        return loop.run(beside(client, named["batch"], requests))
    if named["part"] == "requests":
        return loop.run(workload(client, named["load"], decode, requests))
    return loop.run(behind(client, requests))


async def _warmed(client: Client, requests: Requests) -> tuple[float, int]:
    """Seconds of a long prompt that is no engine's first; tokens of an answer beside one."""
    parts, _ = requests.check()
    await client.ask(requests.context, 8)
    if parts == ("behind",):
        return (await client.ask(requests.behind, 1)).first_s, 2
    await client.ask(requests.prompt, 1)
    prompt_s = (await client.ask(requests.prompt, 1)).first_s
    return prompt_s, await decode_length(client, requests, prompt_s)
