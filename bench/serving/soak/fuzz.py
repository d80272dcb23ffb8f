"""Requests that make no sense: each gets an answer that is no failure of the server's."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import httpx2

from bench.serving.process import ServerProcess

_CLIENTS = 16
_SHOWN = 5
_MESSAGES = [{"role": "user", "content": "x"}]
_TOOL = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [*_MESSAGES, {"role": "assistant", "content": "y"}, *_MESSAGES],
        "max_tokens": 2,
        "tools": [{"type": "function", "function": _TOOL}],
        "tool_choice": "auto",
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}},
        "logit_bias": {"5": 1},
        "stop": ["z"],
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    "/v1/completions": {"prompt": [5, 6, 7], "max_tokens": 2, "logprobs": 1, "echo": True, "n": 2},
    "/v1/responses": {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}]}],
        "max_output_tokens": 2,
        "tools": [{"type": "function", **_TOOL}],
    },
    "/v1/messages": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
        "max_tokens": 2,
        "system": "s",
        "tools": [{"name": "add", "input_schema": {"type": "object"}}],
    },
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [5]},
}
_ODD: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    0.5,
    1e308,
    -0.0,
    10**30,
    "",
    "x" * 3000,
    "\ud800",
    "\0",
    [],
    {},
    [[]],
)


def run(count: int, seed: int, model: Sequence[str]) -> tuple[str, bool]:
    """A line of what happened, and whether that is as it should be."""
    # A request that asks for an endless answer gets half a second.
    with ServerProcess(["--max-batch", str(_CLIENTS), "--max-seconds", "0.5", *model]) as process:
        statuses = asyncio.run(statuses_of(process.url, count, seed))
        alive = process.alive
    told = ", ".join(f"{n} got {status}" for status, n in sorted(statuses.items()))
    bad = sum(n for status, n in statuses.items() if not 200 <= status < 500)
    return f"{count} requests, seed {seed}: {told}", alive and not bad


async def statuses_of(url: str, count: int, seed: int) -> Counter[int]:
    """How often each status came; 0: there was no answer."""
    statuses: Counter[int] = Counter()
    numbers = iter(range(count))
    shown = 0

    async def client(http: httpx2.AsyncClient) -> None:
        nonlocal shown
        for number in numbers:
            path, data = request_of(random.Random(f"{seed} {number}"))
            try:
                status = (await http.post(path, content=data)).status_code
            except httpx2.HTTPError as error:
                status = 0
                data = data[:200] + f" ({type(error).__name__})".encode()
            statuses[status] += 1
            if not 200 <= status < 500 and shown < _SHOWN:
                shown += 1
                print(f"{status} at {path}: {data[:500]!r}", file=sys.stderr)

    async with httpx2.AsyncClient(base_url=url, timeout=60, trust_env=False) as http:
        await asyncio.gather(*(client(http) for _ in range(_CLIENTS)))
        # Nothing that has been asked is still in it.
        assert (await http.get("/ready")).status_code == 200
    return statuses


def request_of(draw: random.Random) -> tuple[str, bytes]:
    """A path, and a body that was sound before some of it was changed."""
    path = draw.choice(list(BODIES))
    body = json.loads(json.dumps(BODIES[path]))
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        body = _changed(body, draw)
    data = json.dumps(body).encode()
    if draw.random() < 0.1:
        at = draw.randrange(len(data) + 1)
        junk = draw.randbytes(draw.randrange(4))
        data = data[:at] + junk + data[at + draw.randrange(20) :]
    return path, data


def _changed(value: Any, draw: random.Random) -> Any:
    """A value with something inside of it replaced, left out, or added."""
    if draw.random() < 0.3 or not value or not isinstance(value, dict | list):
        return (
            deepcopy(draw.choice([value, *_ODD]))
            if draw.random() < 0.9
            else [value] * draw.randrange(5)
        )
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = draw.choice(keys)
    how = draw.random()
    if how < 0.15:
        del value[key]
    elif how < 0.25 and isinstance(value, dict):
        value[draw.choice(("type", "role", "n", "seed", "unknown"))] = deepcopy(draw.choice(_ODD))
    elif how < 0.35 and isinstance(value, list):
        value += deepcopy(value[: draw.randrange(100)])
    else:
        value[key] = _changed(value[key], draw)
    return value
