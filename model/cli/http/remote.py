"""A conversation with a server that speaks OpenAI's API: what `pykernels chat --url` uses."""

from __future__ import annotations

import http.client
import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pykernels.errors import PykernelsError

from ..shared.common import err

_SECONDS = 600.0
"""Without a byte, after which the server is given up."""


class Remote:
    """One server.

    Args:
        url: its address, with or without ``/v1``.
        key: None: it asks for none.
        settings: fields of a request, without those that are None.

    Raises:
        PykernelsError: no URL of HTTP.
    """

    def __init__(self, url: str, key: str | None, settings: Mapping[str, Any]) -> None:
        if not url.startswith(("http://", "https://")):
            raise PykernelsError(f"{url!r} is no URL", "Give one as http://127.0.0.1:8080")
        self._base = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {"Content-Type": "application/json"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"
        self._settings = {name: value for name, value in settings.items() if value is not None}

    def model(self) -> str:
        """The first model that the server names."""
        with self._open("/models", None) as answer:
            try:
                return str(json.load(answer)["data"][0]["id"])
            except (ValueError, KeyError, IndexError, TypeError):
                raise PykernelsError(
                    f"{self._base}/models names no model", "Give the address of such a server"
                ) from None

    def write(self, model: str, messages: Sequence[Mapping[str, str]]) -> tuple[str, str]:
        """Streams the answer to stdout, and reasoning to stderr; returns it with its figures."""
        body = {
            "model": model,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._settings,
        }
        begun, first, usage, answer, thinks = time.perf_counter(), None, None, "", False
        try:
            with self._open("/chat/completions", body) as stream:
                for event in self._events(stream):
                    usage = event.get("usage") or usage
                    for choice in event.get("choices", ()):
                        delta = choice.get("delta") or {}
                        if thought := delta.get("reasoning_content"):
                            err().print(thought, style="dim", markup=False, end="")
                            thinks = True
                        if text := delta.get("content"):
                            if thinks:
                                err().print()
                            thinks = False
                            first = first or time.perf_counter()
                            sys.stdout.write(text)
                            sys.stdout.flush()
                            answer += text
        finally:
            if answer:
                sys.stdout.write("\n")
                sys.stdout.flush()
        return answer, _figures(usage, begun, first, time.perf_counter())

    def _events(self, stream: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
        try:
            for line in stream:
                data = line.removeprefix(b"data:").strip()
                if not line.startswith(b"data:") or data == b"[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    message = event["error"].get("message", "it does not say why")
                    raise PykernelsError(f"the server failed: {message}", "Look into its log")
                yield event
        except (OSError, http.client.HTTPException) as error:
            raise self._gone(error) from error

    def _open(self, path: str, body: Mapping[str, Any] | None) -> http.client.HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, self._headers)
        try:
            answer: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=_SECONDS)
        except urllib.error.HTTPError as error:
            raise PykernelsError(
                f"{self._base} answers {error.code}: {_message(error)}", _hint(error.code)
            ) from None
        except (OSError, http.client.HTTPException) as error:
            raise self._gone(error) from error
        return answer

    def _gone(self, error: Exception) -> PykernelsError:
        reason = getattr(error, "reason", error)
        return PykernelsError(
            f"{self._base} cannot be reached: {reason}",
            "Is the server running? See pykernels serve",
        )


def _message(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return str(error.reason)


def _hint(status: int) -> str:
    if status == 401:
        return "Give the server's key with --api-key-file"
    return "Try again later" if status in (429, 503) else "Change what the message names"


def _figures(
    usage: Mapping[str, Any] | None, begun: float, first: float | None, ended: float
) -> str:
    parts = []
    if usage is not None:
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        parts.append(f"{usage['prompt_tokens']} prompt tokens, {cached} of them cached")
    if first is not None:
        parts.append(f"first token after {first - begun:.2f} s")
        tokens = 0 if usage is None else usage["completion_tokens"] - 1
        if tokens > 0 and ended > first:
            parts.append(f"{tokens / (ended - first):.1f} tok/s")
    return " · ".join(parts)
