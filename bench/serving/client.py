"""One server, asked over HTTP: what it takes, and one streamed completion with its times."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx2

from pykernels.errors import PykernelsError

from .workload import PromptWord, Request, prompt_of, words

SILENCE = 600.0
"""Seconds without a byte after which a request has failed."""
_WORDS = 2048
_UNKNOWN_FIELD = (400, 422)


@dataclass
class Outcome:
    """One request, as its client saw it.

    Attributes:
        status: HTTP's; 0: there was no answer.
        error: why it failed; "" if it did not.
        cancelled: its client went away, as planned.
        begun: when it arrived, in seconds of a monotonic clock: waiting for a free client counts.
        pieces: when each piece of text came, the same clock.
        ended: when the answer was whole.
        prompt_tokens, output_tokens, cached_tokens: what the server counted.
    """

    begun: float
    status: int = 0
    error: str = ""
    cancelled: bool = False
    pieces: list[float] = field(default_factory=list)
    ended: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0

    @property
    def whole(self) -> bool:
        """Whether the answer came to its end."""
        return not self.error and not self.cancelled

    @property
    def ttft(self) -> float:
        """Seconds to the first piece of text; `pieces` must not be empty."""
        return self.pieces[0] - self.begun

    @property
    def token_seconds(self) -> float | None:
        """Seconds a token after the first piece; None for an answer of one token."""
        if self.output_tokens < 2 or not self.pieces:
            return None
        return (self.pieces[-1] - self.pieces[0]) / (self.output_tokens - 1)


@dataclass(frozen=True)
class Accepted:
    """What a server takes: the model that it names, fields of a request, prompts."""

    model: str
    vocabulary: Sequence[PromptWord]
    pieces_per_token: float
    ignores_eos: bool

    @property
    def takes_ids(self) -> bool:
        return isinstance(self.vocabulary[0], int)


class Server:
    """Its address, and connections to it. Used as an asynchronous context manager.

    Args:
        url: with or without ``/v1``.
        key: None: it asks for none.

    Raises:
        PykernelsError: no URL of HTTP.
    """

    def __init__(self, url: str, key: str | None) -> None:
        if not url.startswith(("http://", "https://")):
            raise PykernelsError(f"{url!r} is no URL", "Give one as http://127.0.0.1:8080")
        self.root = url.rstrip("/").removesuffix("/v1")
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        # A proxy of the environment would be timed too.
        self._http = httpx2.AsyncClient(
            headers=headers, limits=limits, timeout=SILENCE, trust_env=False
        )

    async def __aenter__(self) -> Server:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def accepted(self, prompt: int, seed: int) -> Accepted:
        """Ask for the model, then for a few tokens after a prompt of that length, which also warms
        it up: with what not every server knows, then without.

        Raises:
            PykernelsError: nobody answers, or it accepts none of them.
        """
        model = await self._model()
        texts: Sequence[PromptWord] = words(_WORDS, seed)
        ids = await self._ids(model, prompt_of(texts))
        refused = Outcome(0.0)
        tries = [
            (kind, eos) for kind in ((ids, texts) if ids else (texts,)) for eos in (True, False)
        ]
        for vocabulary, ignores_eos in tries:
            # Backwards: no prefix of it is one of the prompts that are timed.
            pieces = [vocabulary[-1 - i % len(vocabulary)] for i in range(prompt)]
            one, chosen = (
                Request(0.0, prompt_of(pieces), None),
                Accepted(model, vocabulary, 1.0, ignores_eos),
            )
            refused = await self.ask(one, chosen, 2, time.perf_counter())
            if refused.whole:
                counted = prompt if chosen.takes_ids else refused.prompt_tokens
                return replace(chosen, pieces_per_token=prompt / max(1, counted))
            if refused.status not in _UNKNOWN_FIELD:
                break
        answered = f"{refused.status}: " if refused.status not in (0, 200) else ""
        raise PykernelsError(
            f"{self.root}/v1/completions: {answered}{refused.error}",
            "Give the address of a server with OpenAI's completions, or a shorter --prompt",
        )

    async def ask(self, request: Request, accepted: Accepted, tokens: int, begun: float) -> Outcome:
        """Stream one completion. What fails is an outcome, not an exception."""
        body = {
            "model": accepted.model,
            "prompt": request.prompt,
            "max_tokens": tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if accepted.ignores_eos else {}),
        }
        outcome = Outcome(begun)
        try:
            async with self._http.stream(
                "POST", f"{self.root}/v1/completions", json=body
            ) as answer:
                outcome.status = answer.status_code
                if answer.status_code != 200:
                    outcome.error = _message(await answer.aread(), answer.reason_phrase)
                else:
                    await _read(answer, outcome, request.cancel_after)
        except (httpx2.HTTPError, httpx2.StreamError) as error:
            outcome.error = str(error) or type(error).__name__
        outcome.ended = time.perf_counter()
        return outcome

    async def _model(self) -> str:
        try:
            answer = await self._http.get(f"{self.root}/v1/models")
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise PykernelsError(
                f"{self.root} cannot be reached: {str(error) or type(error).__name__}",
                "Is the server running? See pykernels serve",
            ) from None
        if answer.status_code != 200:
            raise PykernelsError(
                f"{self.root}/v1/models answers {answer.status_code}:"
                f" {_message(answer.content, answer.reason_phrase)}",
                "Give the server's key with --api-key-file"
                if answer.status_code == 401
                else "Give the address of a server that speaks OpenAI's API",
            )
        try:
            return str(answer.json()["data"][0]["id"])
        except (ValueError, KeyError, IndexError, TypeError):
            raise PykernelsError(
                f"{self.root}/v1/models names no model", "Give the address of such a server"
            ) from None

    async def _ids(self, model: str, text: list[int] | str) -> Sequence[PromptWord]:
        """Distinct token ids of that text, as ``/tokenize`` of vLLM gives them; none without it."""
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        try:
            answer = await self._http.post(f"{self.root}/tokenize", json=body)
            tokens = answer.json()["tokens"] if answer.status_code == 200 else []
        except (httpx2.HTTPError, ValueError, KeyError, TypeError):
            return []
        if not isinstance(tokens, list) or not all(type(one) is int for one in tokens):
            return []
        return list(dict.fromkeys(tokens))


async def _read(answer: httpx2.Response, outcome: Outcome, cancel_after: int | None) -> None:
    """The events of a stream.

    After `cancel_after` pieces of text, at the latest after the last one, the rest is left unread:
    an answer has fewer pieces than tokens where a character takes several of them.
    """
    finished = False
    async for line in answer.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            finished = True
            break
        now = time.perf_counter()
        try:
            event = json.loads(data)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            outcome.error = "an event is no JSON object"
            return
        if "error" in event:
            outcome.error = _message(data.encode(), "it does not say why")
            return
        _count(event.get("usage"), outcome)
        last = False
        for choice in event.get("choices", ()):
            if choice.get("text"):
                outcome.pieces.append(now)
            last |= choice.get("finish_reason") is not None
        if cancel_after is not None and (last or len(outcome.pieces) >= cancel_after):
            outcome.cancelled = True
            return
    if not finished:
        outcome.error = "the stream ended early"
    elif not outcome.output_tokens:
        outcome.error = "the stream has no usage"


def _count(usage: Mapping[str, Any] | None, outcome: Outcome) -> None:
    if usage:
        outcome.prompt_tokens = usage.get("prompt_tokens", 0)
        outcome.output_tokens = usage.get("completion_tokens", 0)
        details = usage.get("prompt_tokens_details") or {}
        outcome.cached_tokens = details.get("cached_tokens") or 0


def _message(body: bytes, otherwise: str) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return otherwise
