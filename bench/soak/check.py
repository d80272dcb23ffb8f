"""Requests whose every token is known before, and what becomes of them."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from pykernels.errors import PykernelsError
from runtime.engine import Engine, RequestHandle, SamplingParams
from runtime.runner.batch import DeviceLost
from runtime.workers.pool import TaskError, WorkerPool

AT_ONCE = 8
"""Requests that run at once."""
SURE = 0.3
"""Lead that the likeliest token's logprob must have: rounding may decide what is closer."""


class Wrong(PykernelsError):
    """What may not happen has happened."""


@dataclass(frozen=True)
class Expected:
    """A prompt, and the tokens that follow it for sure."""

    prompt: list[int]
    tokens: tuple[int, ...]


@dataclass
class Counts:
    """What happened.

    Attributes:
        requests: that were submitted: ``answered`` in full, or ``cancelled`` or ``failed`` with the
            first of their tokens; ``tokens`` of all.
        steps: of the engine, of which ``failed_steps`` failed.
        late: steps whose time was up at once.
        ended: requests that had an error since the workers had ended.
    """

    requests: int = 0
    answered: int = 0
    cancelled: int = 0
    failed: int = 0
    tokens: int = 0
    steps: int = 0
    failed_steps: int = 0
    late: int = 0
    ended: int = 0
    seconds: float = 0.0


def answers(
    truth: Engine, engine: Engine, prompts: Sequence[list[int]], tokens: int, sure: float = SURE
) -> list[Expected]:
    """What an engine of the CPU writes greedily, up to the first token that is not sure.

    A token is sure if it is far ahead of the second one on both engines, alone and undisturbed: the
    least rounding may let a router choose other experts, and from there on both are right.

    Args:
        sure: how far, in logprobs.

    Raises:
        Wrong: the engines differ too often for that.
    """
    answers_, alone, both = [], 0, 0
    for prompt in prompts:
        first, second = (_sure(one, prompt, tokens, sure) for one in (truth, engine))
        shared = 0
        for ours, theirs in zip(first, second, strict=False):
            if ours != theirs:
                break
            shared += 1
        alone, both = alone + len(first), both + shared
        if shared:
            answers_.append(Expected(prompt, first[:shared]))
    if both < alone / 2 or len(answers_) < AT_ONCE:
        raise Wrong(f"both engines write only {both} of {alone} tokens alike", "A bug")
    return answers_


def _sure(engine: Engine, prompt: list[int], tokens: int, least: float) -> tuple[int, ...]:
    params = SamplingParams(temperature=0, max_tokens=tokens, logprobs=2, ignore_eos=True)
    sure = []
    for token in engine.generate([prompt], params)[0].completions[0].logprobs:
        (_, first), (_, second) = token.top[:2]
        if first - second < least:
            break
        sure.append(token.token)
    return tuple(sure)


def soak(
    engine: Engine, pages: int, expected: Sequence[Expected], steps: int, seed: int, counts: Counts
) -> None:
    """Asks for answers until an engine has done so many steps more; checks each.

    New ones are asked for while others are answered.

    Args:
        pages: of the engine's cache.

    Raises:
        Wrong: another token, too few or too many of them, or a lost page.
    """
    random_, asked = random.Random(seed), deque[tuple[RequestHandle, tuple[int, ...]]]()
    last = engine.stats.steps + steps
    while engine.stats.steps < last or asked:
        more = AT_ONCE - len(asked)
        for answer in random_.sample(expected, more if engine.stats.steps < last else 0):
            tokens = answer.tokens[: random_.randint(1, len(answer.tokens))]
            asked.append((engine.submit(answer.prompt, _greedy(len(tokens))), tokens))
            counts.requests += 1
        if random_.random() < 0.1:
            random_.choice(asked)[0].cancel()
        _check(*asked.popleft(), counts)
    stats = engine.stats
    counts.steps, counts.failed_steps = stats.steps, stats.failed_steps
    if stats.free_pages + stats.cached_pages != pages:
        raise Wrong(f"of {pages} pages {stats.free_pages + stats.cached_pages} are left", "A bug")


def end(engine: Engine, pool: WorkerPool, expected: Sequence[Expected], counts: Counts) -> None:
    """Ends the workers while requests run: those that are not answered get the error.

    Raises:
        Wrong: the engine still takes requests, or gave a wrong token.
    """
    asked = expected[:AT_ONCE]
    handles = [(engine.submit(a.prompt, _greedy(len(a.tokens))), a.tokens) for a in asked]
    next(handles[0][0])
    pool.close()
    before = counts.ended
    for handle, tokens in handles[1:]:
        _check(handle, tokens, counts)
    try:  # if all were answered, the engine finds out now
        _check(engine.submit(expected[0].prompt, _greedy(1)), expected[0].tokens[:1], counts)
    except PykernelsError as error:
        if "engine has failed" not in error.cause and "closed" not in error.cause:
            raise
    if engine.healthy or counts.ended == before:
        raise Wrong("the engine goes on without its workers", "A bug")


def _greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def _check(handle: RequestHandle, wanted: tuple[int, ...], counts: Counts) -> None:
    """Takes a request's tokens to its end."""
    tokens: list[int] = []
    reason = None
    try:
        for chunk in handle:
            tokens += chunk.token_ids
            reason = chunk.finish_reason
    except PykernelsError as error:
        cause = error.__cause__
        if isinstance(cause, TaskError):
            counts.failed += 1
        elif isinstance(cause, DeviceLost) or "pool is closed" in str(cause):
            counts.ended += 1
        else:
            raise
    counts.tokens += len(tokens)
    counts.cancelled += reason == "cancelled"
    counts.answered += reason == "length"
    whole = reason != "length" or len(tokens) == len(wanted)
    if tuple(tokens) != wanted[: len(tokens)] or not whole:
        raise Wrong(f"{tokens} came where {list(wanted)} was to come ({reason})", "A bug")
