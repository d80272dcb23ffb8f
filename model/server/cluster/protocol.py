"""What a router and its nodes say to each other: JSON, which holds no code.

A node has these routes under ``PATH``. Answers that take their time are lines of JSON; an empty
line, or one that begins with a colon, says that it is still there.

    GET  node             what it is (``NodeFacts``)
    GET  node/stats       its engine's counts (``EngineStats``)
    POST node/held        {keys}: what it has of a prompt (``Held``)
    POST node/prefill     {prompt, keys, peers}: reads a prompt, shares its pages (``Prefilled``)
    POST node/generate    {prompt, params, grammar, special, drawn, peers}: events (``Told``,
                          ``Routed``)

``peers`` are nodes whose memory has pages of the prompt (``Peer``).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from runtime.engine import EngineStats, RequestStats, SamplingParams, TokenLogprob
from runtime.kv_tiers.stats import LevelStats
from runtime.kv_tiers.transfer.endpoint import Peer
from runtime.runner.routing import RoutedExperts, RoutedLayer

from ..backend.interface import DevicePart
from ..backend.messages import Failure, Routed, Told
from ..http.frames import json_bytes

PATH = "/v1/pykernels/node"
VERSION = 2
"""Of all this: a router takes no node of another one."""


@dataclass(frozen=True)
class NodeFacts:
    """What a node is; see ``ModelFacts``.

    Attributes:
        role: "prefill" or "decode".
        ready: whether it takes requests.
    """

    version: int
    role: str
    ready: bool
    model_type: str
    kv_model: str
    longest: int
    max_model_len: int
    vocab_size: int
    max_num_seqs: int
    num_pages: int
    page_size: int
    workers: int
    routed_layers: tuple[RoutedLayer, ...]
    parts: tuple[DevicePart, ...]
    ways: tuple[str, ...] = ()
    peer: Peer | None = None


@dataclass(frozen=True)
class Prefilled:
    """A prompt was read.

    Attributes:
        computed, cached: tokens that were computed, and found in the node's cache.
        stored: leading pages that other nodes have now.
        seconds: that it took to compute it.
    """

    computed: int
    cached: int
    stored: int
    seconds: float


FACTS: TypeAdapter[NodeFacts] = TypeAdapter(NodeFacts)
_PARAMS = tuple(f.name for f in fields(SamplingParams) if f.name != "constraint")


def params_body(params: SamplingParams) -> dict[str, Any]:
    """Sampling parameters, without their constraint, as JSON has them."""
    return {name: getattr(params, name) for name in _PARAMS}


def params_of(body: Mapping[str, Any]) -> SamplingParams:
    """Those that ``params_body`` was made of; the constraint follows.

    Raises:
        PykernelsError: a value out of range; ValueError, TypeError: something else.
    """
    bias = {int(token): value for token, value in dict(body.get("logit_bias") or {}).items()}
    return SamplingParams(**{**body, "logit_bias": bias})


def stats_body(stats: EngineStats) -> dict[str, Any]:
    """Counts of an engine, as JSON has them."""
    body = {f.name: getattr(stats, f.name) for f in fields(EngineStats)}
    levels = {name: asdict(level) for name, level in stats.kv_levels.items()}
    steps = {"decode_steps": dict(stats.decode_steps), "prompt_steps": dict(stats.prompt_steps)}
    return {**body, **steps, "kv_levels": levels}


def stats_of(body: Mapping[str, Any]) -> EngineStats:
    """Those that ``stats_body`` was made of."""
    steps = Counter({int(tokens): count for tokens, count in body["decode_steps"].items()})
    levels = {name: LevelStats(**level) for name, level in body["kv_levels"].items()}
    prompts = Counter(body["prompt_steps"])
    return EngineStats(
        **{**body, "decode_steps": steps, "prompt_steps": prompts, "kv_levels": levels}
    )


def summed(stats: Mapping[str, EngineStats]) -> EngineStats:
    """Those of several nodes, by name, as one; levels of the KV cache stay each its own."""
    total, levels = EngineStats(), dict[str, LevelStats]()
    for node, each in stats.items():
        for name in (f.name for f in fields(EngineStats) if f.name != "kv_levels"):
            setattr(total, name, getattr(total, name) + getattr(each, name))
        levels |= {f"{node} {level}": counts for level, counts in each.kv_levels.items()}
    total.kv_levels = levels
    return total


def line_of(news: Told | Routed) -> bytes:
    """One line of an answer."""
    if isinstance(news, Routed):
        routed = news.experts
        rows = [routed.first, routed.ids.tolist(), routed.weights.tolist()]
        return json_bytes({"output": news.output, "routed": rows}) + b"\n"
    told = news._asdict()
    del told["key"]
    told["stats"] = None if news.stats is None else asdict(news.stats)
    return json_bytes(told) + b"\n"


def news_of(line: str | bytes) -> Told | Routed:
    """What a line says. Raises ValueError, TypeError or KeyError: it is none."""
    body = json.loads(line)
    if "routed" in body:
        first, ids, weights = body["routed"]
        experts = RoutedExperts(first, np.array(ids, np.int32), np.array(weights, np.float32))
        return Routed(0, body["output"], experts)
    logprob, stats, failure = body["logprob"], body["stats"], body["failure"]
    body["logprob"] = None if logprob is None else _logprob(logprob)
    body["prompt_logprobs"] = [_logprob(each) for each in body["prompt_logprobs"]]
    body["stats"] = None if stats is None else RequestStats(**stats)
    body["failure"] = None if failure is None else Failure(*failure)
    return Told(0, **body)


def _logprob(value: Sequence[Any]) -> TokenLogprob:
    token, logprob, top = value
    return TokenLogprob(token, logprob, tuple((token, logprob) for token, logprob in top))
