"""An answer as Anthropic's messages: blocks, whole or event by event."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from ...text.detokenize import Detokenizer
from ..http.errors import as_api_error, error_body
from ..http.frames import frame
from ..parsers import Content, Event, Reasoning, ToolCallArguments, ToolCallEnd, ToolCallStart
from ..serving.generation import Generation, OutputDelta, Usage
from ..serving.served import Served
from .schema import MessagesRequest

PATH = "/v1/messages"


class MessageAnswer:
    """Writes one request's answer."""

    def __init__(self, served: Served, body: MessagesRequest, generation: Generation) -> None:
        self.served, self.body, self.generation = served, body, generation
        self.head: dict[str, Any] = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": body.model or served.name,
        }

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """The stream's events; an error ends it as one of them."""
        blocks = _Blocks()
        start = {
            **self.head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_body(Usage(prompt_tokens=self.generation.prompt_tokens)),
        }
        try:
            async with self.generation as output_deltas:
                yield _frame("message_start", message=start)
                yield _frame("ping")
                async for output_delta in output_deltas:
                    for event in output_delta.events:
                        for name, fields in blocks.events(event):
                            yield _frame(name, **fields)
                    if output_delta.finish_reason:
                        last = output_delta
                for name, fields in blocks.close():
                    yield _frame(name, **fields)
                reason = await self._reason(last)
                usage = usage_body(await output_deltas.usage())
                yield _frame("message_delta", delta=reason, usage=usage)
                yield _frame("message_stop")
        except Exception as error:
            yield frame(error_body(PATH, as_api_error(error)), "error")

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        blocks = _Blocks()
        async with self.generation as output_deltas:
            async for output_delta in output_deltas:
                for event in output_delta.events:
                    for _ in blocks.events(event):
                        pass
                if output_delta.finish_reason:
                    last = output_delta
            for _ in blocks.close():
                pass
            usage = usage_body(await output_deltas.usage())
            reason = await self._reason(last)
        return {**self.head, "content": blocks.content, **reason, "usage": usage}

    async def _reason(self, last: OutputDelta) -> dict[str, Any]:
        """Why it ended, and the stop sequence that ended it."""
        if last.finish_reason != "stop":
            cut = (self.generation.params.max_tokens or 0) < self.body.max_tokens
            longest = last.finish_reason == "length" and cut
            word = "model_context_window_exceeded" if longest else "max_tokens"
            return {"stop_reason": word, "stop_sequence": None}
        if self.generation.called:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        sequence = await self._sequence()
        word = "end_turn" if sequence is None else "stop_sequence"
        return {"stop_reason": word, "stop_sequence": sequence}

    async def _sequence(self) -> str | None:
        """The first of the request's stop sequences that the model has written."""
        stops = self.body.stop_sequences or ()
        if not stops or self.served.model.tokenizer is None:
            return None
        detokenizer = Detokenizer(self.served.model.tokenizer, self.served.parser.special_tokens)
        (completion,) = await self.generation.completions()
        text = "".join(detokenizer.push(token) for token in completion.token_ids)
        text += detokenizer.finish()
        matches = [(at, stop) for stop in stops if stop and (at := text.find(stop)) >= 0]
        return min(matches)[1] if matches else None


class _Blocks:
    """Turns a parser's events into blocks, and into the events that tell of them."""

    def __init__(self) -> None:
        self.content: list[dict[str, Any]] = []
        self._kind: str | None = None  # of the block that is open
        self._arguments: list[str] = []

    def events(self, event: Event) -> Iterator[tuple[str, dict[str, Any]]]:
        if isinstance(event, Content):
            yield from self._text("text", {"type": "text", "text": ""}, event.text)
        elif isinstance(event, Reasoning):
            thought = {"type": "thinking", "thinking": "", "signature": ""}
            yield from self._text("thinking", thought, event.text)
        elif isinstance(event, ToolCallStart):
            yield from self.close()
            block: dict[str, Any] = {
                "type": "tool_use",
                "id": event.id,
                "name": event.name,
                "input": {},
            }
            yield self._open("tool_use", block)
        elif isinstance(event, ToolCallArguments):
            self._arguments.append(event.text)
            yield self._delta({"type": "input_json_delta", "partial_json": event.text})
        elif isinstance(event, ToolCallEnd):
            yield from self.close()

    def close(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Ends the block that is open."""
        if self._kind is None:
            return
        if self._kind == "tool_use":
            self.content[-1]["input"] = _object("".join(self._arguments))
            self._arguments = []
        if self._kind == "thinking":
            yield self._delta({"type": "signature_delta", "signature": ""})
        self._kind = None
        yield "content_block_stop", {"index": len(self.content) - 1}

    def _text(
        self, kind: str, block: dict[str, Any], text: str
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        if self._kind != kind:
            if kind == "text" and not text.strip():  # between reasoning and calls
                return
            yield from self.close()
            yield self._open(kind, block)
        self.content[-1][kind] += text
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def _open(self, kind: str, block: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        self._kind = kind
        self.content.append(block)
        fields = {"index": len(self.content) - 1, "content_block": dict(block)}
        return "content_block_start", fields

    def _delta(self, delta: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        return "content_block_delta", {"index": len(self.content) - 1, "delta": delta}


def usage_body(usage: Usage) -> dict[str, Any]:
    """Anthropic counts tokens from the cache apart."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _frame(event: str, **fields: Any) -> bytes:
    return frame({"type": event, **fields}, event)


def _object(text: str) -> dict[str, Any]:
    """Arguments that were cut off are none."""
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
