"""A conversation of 2K tokens goes on: its second turn finds the first one in the prefix cache."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from typing import Any

import httpx2

from bench.serving.process import ServerProcess
from pykernels.errors import PykernelsError

from ..workload import words

_TOKENS, _TIMES = 1850, 5  # the embedded model has 2048 positions


def run(seed: int, model: Sequence[str]) -> tuple[str, bool]:
    """A line of what happened, and whether the second turn's prompt was found in the cache."""
    firsts, seconds, shares = [], [], []
    with ServerProcess(model) as process, httpx2.Client(base_url=process.url, timeout=600) as http:
        size = _size(http, "".join(words(_TOKENS, seed))) / _TOKENS
        for turn in range(_TIMES + 1):
            text = "".join(words(round(_TOKENS / size), 1000 * seed + turn))
            messages = [{"role": "user", "content": text}]
            first, answer, usage = _ask(http, messages)
            messages += [
                {"role": "assistant", "content": answer},
                {"role": "user", "content": "And then?"},
            ]
            second, _, after = _ask(http, messages)
            if turn:  # the first conversation warms up
                firsts.append(first)
                seconds.append(second)
                shares.append(
                    after["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"]
                )
    one, two = statistics.median(firsts), statistics.median(seconds)
    share = min(shares)
    told = (
        f"first token of a conversation of {usage['prompt_tokens']} tokens after"
        f" {1e3 * one:.1f} ms, of its second turn after {1e3 * two:.1f}: {two / one:.2f} of that;"
        f" {share:.0%} of the first turn were cached"
    )
    return told, share > 0.9 and two < one


def _size(http: httpx2.Client, text: str) -> int:
    return len(http.post("/tokenize", json={"prompt": text}).json()["tokens"])


def _ask(http: httpx2.Client, messages: list[dict[str, str]]) -> tuple[float, str, dict[str, Any]]:
    """Seconds to the first token, the answer, and its usage."""
    body = {
        "messages": messages,
        "max_tokens": 32,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    usage: dict[str, Any] = {}
    begun, first, text = time.perf_counter(), 0.0, ""
    with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        if answer.status_code != 200:
            message = json.loads(answer.read())["error"]["message"]
            raise PykernelsError(message, "Choose another --model")
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise PykernelsError(event["error"]["message"], "Choose another --model")
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                delta = choice["delta"]
                new = delta.get("content") or delta.get("reasoning_content") or ""
                first = first or (time.perf_counter() - begun if new else 0.0)
                text += new
    return first, text, usage
