"""Calls as a list of Python's: LFM2."""

from __future__ import annotations

import re
from collections.abc import Generator
from dataclasses import dataclass

from .json_call import json_call
from .json_text import to_json
from .marked import MarkedFormat
from .message import Broken, Message
from .reader import Reader, Wait
from .tagged import random_id
from .values import as_json, parameters_of, types_of

_PLAIN = re.compile(r"""[^'"\\()\[\]{},<\s]+""")
_INSIDE = {quote: re.compile(rf"[^{quote}\\<]+") for quote in "'\""}
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|([nrtbf'\"\\/]))")
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f"}


@dataclass(frozen=True)
class PythonCall(MarkedFormat):
    """``<|tool_call_start|>[NAME(KEY=VALUE, ...), ...]<|tool_call_end|>``: LFM2 and LFM2.5.

    Values are Python's or JSON's. A list of ``{"name": ..., "arguments": {...}}`` is read too,
    which these models write where the system prompt asks for JSON.
    """

    section: tuple[str, str] | None = None
    begins: tuple[str, ...] = ("<|tool_call_start|>",)
    end: str = "<|tool_call_end|>"

    @property
    def special_tokens(self) -> tuple[str, ...]:
        return (*self.think, *self.begins, self.end)

    def call(self, message: Message, begin: str) -> Wait:
        """See ``MarkedFormat``."""
        reader, first = message.reader, True
        yield from reader.space()
        yield from reader.take("[")
        while True:
            yield from reader.space()
            if not first and (yield from reader.take("]")):  # behind a comma too many
                break
            reader.mark = reader.at if reader.mark is None else reader.mark
            try:
                whole = yield from self._one(message)
            except Broken:
                if first:
                    raise
                assert reader.mark is not None
                reader.at, reader.mark = reader.mark, None
                return
            if not whole:
                yield from reader.until((self.end,), _nothing)
                return
            first = False
            yield from reader.space()
            if (yield from reader.take(",", "]")) != ",":
                break
        yield from reader.space()
        yield from reader.take(self.end)

    def _one(self, message: Message) -> Generator[None, None, bool]:
        """Reads a call; False if it ends before it should.

        Raises:
            Broken: it is none.
        """
        reader = message.reader
        if (yield from reader.next()) == "{":
            yield from json_call(message, (self.end,), literal=True, new_id=random_id)
            return True
        name = yield from reader.name()
        if not name or not (yield from reader.take("(")):
            raise Broken
        yield from reader.space()
        closed = yield from reader.take(")")
        key = "" if closed else (yield from _key(reader))
        if not key and not closed:
            raise Broken
        message.start(name, random_id())
        parameters, separator = parameters_of(message.tools, name), "{"
        while not closed:
            value = (yield from self._value(reader)) if key else None
            if value is None:
                return False
            written = _as_json(value, types_of(parameters, key))
            message.arguments(f"{separator}{to_json(key)}: {written}")
            separator = ", "
            if (yield from reader.take(",")):
                yield from reader.space()
            closed = yield from reader.take(")")
            key = "" if closed else (yield from _key(reader))
        message.arguments("{}" if separator == "{" else "}")
        message.end()
        return True

    def _value(self, reader: Reader) -> Generator[None, None, str | None]:
        """The text up to the comma or the parenthesis behind a value, neither consumed; None if
        there is none.

        A quote within a string ends it only where something may stand behind: models forget to
        escape apostrophes.
        """
        pieces, quote, depth = list[str](), "", 0
        while True:
            if not (letter := (yield from reader.next())):
                return None
            plain = _INSIDE[quote] if quote else _PLAIN
            if match := plain.match(reader.text, reader.at):
                pieces.append(match[0])
                reader.at = match.end()
                continue
            if letter == "<" and (yield from reader.take(self.end)):
                reader.at -= len(self.end)
                return None
            if not quote and not depth and letter in ",)]}":
                return "".join(pieces) if letter in ",)" else None
            pieces.append(letter)
            reader.at += 1
            if quote and letter == "\\":
                pieces.append((yield from reader.next()))
                reader.at += len(pieces[-1])
            elif letter == quote:
                pieces.append((yield from _spaces(reader)))
                behind = yield from reader.next()
                quote = "" if behind and behind in (",)]}:" if depth else ",)") else quote
            elif not quote and letter in "'\"":
                quote = letter
            elif not quote:
                depth += (letter in "([{") - (letter in ")]}")


def _key(reader: Reader) -> Generator[None, None, str]:
    """The name of an argument, with the sign behind it; "" if none comes."""
    name = yield from reader.name()
    yield from reader.space()
    if not name or not (yield from reader.take("=")):
        return ""
    yield from reader.space()
    return name


def _spaces(reader: Reader) -> Generator[None, None, str]:
    """White space, consumed."""
    found = ""
    while (letter := (yield from reader.next())).isspace():
        found += letter
        reader.at += 1
    return found


def _as_json(text: str, types: frozenset[str]) -> str:
    """JSON text of a value as it is written in a call."""
    text = text.strip()
    if len(text) < 2 or text[0] not in "'\"" or text[-1] != text[0]:
        return as_json(text, types)
    value = _ESCAPE.sub(_unescaped, text[1:-1])
    value = value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
    return as_json(value, types) if types and "string" not in types else to_json(value)


def _unescaped(match: re.Match[str]) -> str:
    if code := match[1] or match[2]:
        return chr(int(code, 16))
    return _ESCAPED.get(match[3], match[3])


def _nothing(text: str) -> None:
    """What follows a call that is not whole is dropped."""
