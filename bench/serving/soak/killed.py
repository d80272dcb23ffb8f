"""A server that is killed while it answers: its clients hear of it, and the next one at the same
port starts as ever and gives the same answer to the same question."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Sequence

import httpx2

from bench.serving.process import ServerProcess

_CLIENTS, _TOKENS = 8, 4000
_HEARD_SECONDS = 10.0


def run(times: int, seed: int, model: Sequence[str]) -> tuple[str, bool]:
    """A line of what happened, and whether that is as it should be."""
    draw = random.Random(seed)
    answers: set[str] = set()
    starts: list[float] = []
    unheard, port = 0, 0
    for _ in range(times):
        process = ServerProcess(["--max-batch", str(_CLIENTS), *model], port)
        port = process.port
        starts.append(process.seconds)
        try:
            answer, lost = asyncio.run(_killed(process, draw.uniform(0.1, 1.0)))
        finally:
            process.kill()
        answers.add(answer)
        unheard += lost
    told = (
        f"killed {times} times while {_CLIENTS} clients were answered, {unheard} of which did not"
        f" hear of it; the next server was there after {statistics.median(starts):.1f} s, at most"
        f" {max(starts):.1f}; {len(answers)} different answers to one question"
    )
    return told, not unheard and len(answers) == 1


async def _killed(process: ServerProcess, after: float) -> tuple[str, int]:
    """The answer to a question, and the clients that still wait long after the kill."""
    async with httpx2.AsyncClient(
        base_url=process.url, timeout=None, trust_env=False, limits=httpx2.Limits()
    ) as http:
        body = {"prompt": "def quicksort(xs):", "max_tokens": 32, "temperature": 0}
        answered = await http.post("/v1/completions", json=body)
        answer = str(answered.json()["choices"][0]["text"])
        clients = [asyncio.create_task(_listen(http, i)) for i in range(_CLIENTS)]
        await asyncio.sleep(after)
        process.kill()
        _, waiting = await asyncio.wait(clients, timeout=_HEARD_SECONDS)
        for task in waiting:
            task.cancel()
        whole = sum(task.result() for task in clients if task.done() and not task.cancelled())
    return answer, len(waiting) + whole


async def _listen(http: httpx2.AsyncClient, number: int) -> bool:
    """Whether a long answer came to its end."""
    body = {
        "prompt": f"def function_{number}():",
        "max_tokens": _TOKENS,
        "ignore_eos": True,
        "stream": True,
    }
    try:
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    return True
    except (httpx2.HTTPError, httpx2.StreamError):
        pass
    return False
