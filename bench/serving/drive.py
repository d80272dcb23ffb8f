"""Requests sent when they arrive, by as many clients as there may be."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from .client import Accepted, Outcome, Server
from .workload import Load, Request


async def drive(
    server: Server,
    accepted: Accepted,
    load: Load,
    requests: Sequence[Request],
    done: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Send them all; `done` is called with each one's outcome. They come back in their order.

    A finite rate is an open loop: a request arrives whether or not others have been answered, and
    its time starts then, even if it must wait for one of `load.clients`. An infinite rate is a
    closed loop: a client's time starts when it asks.
    """
    places = asyncio.Semaphore(load.clients or len(requests))
    opened = load.rate != float("inf")
    start = time.perf_counter()

    async def one(request: Request) -> Outcome:
        async with places:
            begun = start + request.at if opened else time.perf_counter()
            outcome = await server.ask(request, accepted, load.tokens, begun)
        done(outcome)
        return outcome

    async with asyncio.TaskGroup() as group:
        tasks = []
        for request in requests:
            if opened:
                await asyncio.sleep(start + request.at - time.perf_counter())
            tasks.append(group.create_task(one(request)))
    return [task.result() for task in tasks]
