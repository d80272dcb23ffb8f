"""gpt-oss's harmony format: the output is a sequence of messages, each in a channel.

``<|start|>assistant to=RECIPIENT<|channel|>CHANNEL <|constrain|>json<|message|>TEXT<|end|>``; the
recipient may stand behind the channel as well, and ``<|call|>`` or ``<|return|>`` ends the last.
Source: OpenAI's guide to the harmony response format.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from dataclasses import dataclass

from .message import Content, Message, Reasoning
from .reader import Wait
from .tagged import random_id

_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_STARTS = ("<|start|>", "<|channel|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


@dataclass(frozen=True)
class Harmony:
    """Analysis is reasoning, what goes to a function is a call, anything else content."""

    special_tokens: tuple[str, ...] = (*_STARTS, *_ENDS, "<|message|>", "<|constrain|>")

    def read(self, message: Message, prompt_tail: str) -> Wait:
        """See ``message.Format``. The first header may have begun in the prompt."""
        begun = prompt_tail.rfind("<|start|>")
        header, bar, _ = prompt_tail[max(begun, 0) :].partition("<|message|>")
        if begun < 0 or not bar:
            header = yield from self._header(message, header if begun >= 0 else "")
        written: set[bool] = set()
        while header:
            end = yield from self._body(message, header, written)
            if end in _ENDS:
                end = yield from message.reader.until(_STARTS, message.write)
            header = (yield from self._header(message, end)) if end else ""
        message.close()

    def _header(self, message: Message, begun: str) -> Generator[None, None, str]:
        """What stands before ``<|message|>``; "" if that never comes. Text without a header stays
        what it is."""
        reader = message.reader
        pieces: list[str] = []
        if not begun.endswith(_STARTS):
            opening = yield from reader.take(
                *_STARTS, "<|message|>", "<|constrain|>", " to=", "to="
            )
            if opening == "<|message|>":
                return begun
            if not opening:
                return "<|channel|>final"
            pieces.append(opening)
        if (yield from reader.until(("<|message|>",), pieces.append)):
            return begun + "".join(pieces)
        message.turn(reasoning=False)
        message.write("".join(pieces))
        return ""

    def _body(
        self, message: Message, header: str, written: set[bool]
    ) -> Generator[None, None, str]:
        """The text of a message; returns the marker behind it.

        Args:
            written: of reasoning (True) and content (False), what was written before: a line break
                parts two messages of a kind.
        """
        channels, recipients = _CHANNEL.findall(header), _RECIPIENT.findall(header)
        recipient = recipients[-1] if recipients else ""
        if message.tools and recipient and recipient != "assistant":
            return (yield from self._call(message, recipient.removeprefix("functions.")))
        reasoning = bool(channels) and channels[-1] == "analysis"
        message.turn(reasoning=reasoning)
        if reasoning in written:
            message.events.append(Reasoning("\n") if reasoning else Content("\n"))
        written.add(reasoning)
        return (yield from message.reader.until((*_ENDS, *_STARTS), message.write))

    def _call(self, message: Message, name: str) -> Generator[None, None, str]:
        reader = message.reader
        message.start(name, random_id())
        yield from reader.space()
        if marker := (yield from reader.take(*_ENDS)):
            message.arguments("{}")
            message.end()
            return marker
        ends = (*_ENDS, *_STARTS)
        if not (yield from message.json_arguments(ends, literal=True)):
            return ""
        message.end()
        return (yield from reader.until(ends, _nothing))


def _nothing(text: str) -> None:
    """Text between a call's arguments and its end is dropped."""
