"""Calls that are a JSON object with name and arguments: Qwen and Hermes, Mistral."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass

from .json_text import JsonScanner, from_json, to_json
from .marked import MarkedFormat
from .message import Broken, Message
from .reader import LONGEST_NAME, Wait
from .tagged import random_id

_LONGEST_HEAD = 1024
_LETTERS = string.ascii_letters + string.digits
_HEAD = re.compile(
    r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)+")\s*,\s*"(?:arguments|parameters)"\s*:\s*\{'
)


def json_call(
    message: Message, ends: tuple[str, ...], *, literal: bool, new_id: Callable[[], str]
) -> Wait:
    """Reads ``{"name": NAME, "arguments": {...}}``; gives the arguments as they come if they stand
    behind the name, else when the object is there.

    Args:
        ends, literal: as ``Message.json_arguments``.

    Raises:
        Broken: it is no such object.
    """
    reader = message.reader
    reader.mark = reader.at if reader.mark is None else reader.mark
    start = seen = reader.at - reader.mark  # from the mark on: it moves when text is dropped
    scanner = JsonScanner()
    while True:
        assert reader.mark is not None
        first = reader.mark + start
        if head := _HEAD.match(reader.text, first, first + _LONGEST_HEAD):
            name = _string(head[1])
            reader.at = head.end() - 1
            break
        found, stop, _ = scanner.scan(reader.text, reader.mark + seen, len(reader.text))
        if found == "end":
            name, arguments = _members(reader.text[first:stop])
            reader.at = stop
            message.start(name, new_id())
            message.arguments(arguments)
            message.end()
            return
        if found == "broken" or reader.ended:
            raise Broken
        seen = stop - reader.mark
        yield
    message.start(name, new_id())
    if not (yield from message.json_arguments(ends, literal=literal)):
        return
    message.end()
    rest = JsonScanner(depth=1)
    while True:  # other members of the object
        found, reader.at, _ = rest.scan(reader.text, reader.at, len(reader.text))
        if found != "more" or reader.ended:
            return
        yield


def _string(text: str) -> str:
    try:
        name = str(from_json(text))
        name.encode()
    except ValueError:
        raise Broken from None
    return name


def _members(text: str) -> tuple[str, str]:
    try:
        call = from_json(text)
        arguments = call.get("arguments", call.get("parameters"))
        if isinstance(arguments, str):  # JSON within a string
            arguments = from_json(arguments)
        arguments = {} if arguments is None else arguments
        name = call.get("name")
        is_name = isinstance(name, str) and 0 < len(name) <= LONGEST_NAME
        if not is_name or not isinstance(arguments, dict):
            raise Broken
        name.encode()
        return name, to_json(arguments)
    except (ValueError, RecursionError):
        raise Broken from None


@dataclass(frozen=True)
class Hermes(MarkedFormat):
    """``<tool_call> {"name": ..., "arguments": {...}} </tool_call>``: Qwen2.5, Qwen3, Hermes."""

    section: tuple[str, str] | None = None
    begins: tuple[str, ...] = ("<tool_call>",)
    end: str = "</tool_call>"

    @property
    def special_tokens(self) -> tuple[str, ...]:
        return (*self.think, *self.begins, self.end)

    def call(self, message: Message, begin: str) -> Wait:
        """See ``MarkedFormat``."""
        reader = message.reader
        yield from reader.space()
        if (yield from reader.next()) != "{":
            raise Broken
        yield from json_call(message, (self.end,), literal=False, new_id=random_id)
        yield from reader.space()
        yield from reader.take(self.end)


def short_id() -> str:
    """An id as Mistral's templates want them: nine letters and digits."""
    return "".join(secrets.choice(_LETTERS) for _ in range(9))


@dataclass(frozen=True)
class Mistral(MarkedFormat):
    """``[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]``, or for each call
    ``[TOOL_CALLS]NAME[ARGS]{...}``, between them ``[CALL_ID]ID`` in some versions.

    Attributes:
        array: which of the two the template writes; both are read.
        with_id: whether the template writes ids.
    """

    think: tuple[str, str] = ("[THINK]", "[/THINK]")
    array: bool = False
    with_id: bool = False
    section: tuple[str, str] | None = None
    begins: tuple[str, ...] = ("[TOOL_CALLS]",)

    @property
    def special_tokens(self) -> tuple[str, ...]:
        return (*self.think, *self.begins, "[CALL_ID]", "[ARGS]")

    def call(self, message: Message, begin: str) -> Wait:
        """See ``MarkedFormat``."""
        reader = message.reader
        yield from reader.space()
        if (yield from reader.take("[")):
            yield from self._elements(message)
            return
        if (yield from reader.next()) == "{":
            yield from json_call(message, self.begins, literal=True, new_id=short_id)
            return
        name = yield from reader.name()
        if not name:
            raise Broken
        call_id = ""
        if (yield from reader.take("[CALL_ID]")):
            call_id = yield from reader.name()
        yield from reader.take("[ARGS]")
        yield from reader.space()
        if (yield from reader.next()) != "{":
            raise Broken
        message.start(name, call_id or short_id())
        if (yield from message.json_arguments(self.begins, literal=True)):
            message.end()

    def _elements(self, message: Message) -> Wait:
        reader, first = message.reader, True
        while True:
            yield from reader.space()
            if (yield from reader.next()) != "{":
                if first:
                    raise Broken
                return
            try:
                yield from json_call(message, self.begins, literal=True, new_id=short_id)
            except Broken:
                if first:
                    raise
                assert reader.mark is not None
                reader.at, reader.mark = reader.mark, None
                return
            first = False
            yield from reader.space()
            if (yield from reader.take(",", "]")) != ",":
                return
