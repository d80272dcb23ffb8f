"""What a model's text becomes while it streams: events, and of a message so far its channel, its
white space, its calls."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .json_text import JsonScanner
from .reader import Reader, Wait, any_of


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of the answer, for the user to read."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins. Its arguments follow, then its end; calls do not overlap.

    Attributes:
        index: number of the call in this message, from 0.
        id: unique among the calls of a conversation.
        name: the function's.
    """

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A piece of the arguments. All pieces of a call are the text of one JSON object, unless the
    output was cut off."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """The call is complete."""

    index: int


Event = Content | Reasoning | ToolCallStart | ToolCallArguments | ToolCallEnd

Tools = Sequence[Mapping[str, Any]]
"""As OpenAI's ``tools``: ``{"type": "function", "function": {"name", "parameters"}}``."""


class Broken(Exception):
    """What looked like a call is none: it is text. Never raised once the call has begun."""


class Message:
    """What one message has become so far, for the generator that reads it."""

    def __init__(self, reader: Reader, tools: Tools | None) -> None:
        self.reader, self.tools = reader, tools or ()
        self.events: list[Event] = []
        self.calls = 0
        self.reasoning = False
        self._ids: set[str] = set()
        self._trim = False  # white space at the start of the channel's text
        self._space = ""  # at the end of the text so far: dropped if a marker follows

    def write(self, text: str) -> None:
        """Text of the current channel."""
        text = self._space + text
        if self._trim:
            text = text.lstrip()
        body = text.rstrip()
        self._space = text[len(body) :]
        if body:
            self._trim = False
            self.events.append(Reasoning(body) if self.reasoning else Content(body))

    def turn(self, *, reasoning: bool) -> None:
        """Switches the channel; white space on both sides of the switch is dropped."""
        self.reasoning, self._trim, self._space = reasoning, True, ""

    def close(self) -> None:
        """The end of the text."""
        if self._space and not self.reasoning:
            self.events.append(Content(self._space))
        self._space = ""

    def start(self, name: str, call_id: str) -> None:
        """A call begins; from here on there is no way back. An id that the model has given to
        another call of the message is changed."""
        self.reader.mark = None
        self.turn(reasoning=False)
        if call_id in self._ids:
            call_id = f"{call_id}_{self.calls}"
        self._ids.add(call_id)
        self.events.append(ToolCallStart(self.calls, call_id, name))
        self.calls += 1

    def arguments(self, text: str) -> None:
        """A piece of the arguments of the call that was begun last."""
        if text:
            self.events.append(ToolCallArguments(self.calls - 1, text))

    def end(self) -> None:
        """The call is complete."""
        self.events.append(ToolCallEnd(self.calls - 1))

    def json_arguments(
        self, ends: tuple[str, ...], *, literal: bool
    ) -> Generator[None, None, bool]:
        """Gives a JSON object as arguments. What is no JSON is given as it is, up to a marker,
        which is not consumed.

        Args:
            ends: markers that end the call.
            literal: whether they end it within a string too: markers that no text contains.

        Returns:
            Whether they have ended; False: the text has.
        """
        reader, scanner = self.reader, JsonScanner()
        while True:
            marker = any_of(ends).search(reader.text, reader.at) if literal else None
            stop = len(reader.text)
            if literal:
                stop = marker.start() if marker else reader.certain(ends)
            found, reader.at, written = scanner.scan(reader.text, reader.at, stop)
            self.arguments(written)
            if found == "end":
                return True
            if found == "broken" or marker:
                end = yield from reader.until(ends, self.arguments)
                reader.at -= len(end)
                return bool(end)
            if reader.ended:
                return False
            yield


class Format(Protocol):
    """How a family writes a message."""

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Its markers that may be tokens of their own."""
        ...

    def read(self, message: Message, prompt_tail: str) -> Wait:
        """Reads a whole message.

        Args:
            prompt_tail: as ``Parser.stream`` is given it.
        """
        ...
