"""Gemma 4's calls: arguments in a notation of its own, in which quotes are a token.

``<|tool_call>call:NAME{key:<|"|>text<|"|>,other:[1,true,{inner:null}]}<tool_call|>``. Keys are
bare, texts hold anything but the quote and escape nothing. Source: Google's guide "Gemma 4 Prompt
Formatting".
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from dataclasses import dataclass

from .json_text import from_json, to_json
from .marked import MarkedFormat
from .message import Broken, Message
from .reader import Wait
from .tagged import random_id

QUOTE = '<|"|>'
_CLOSES = {"{": "}", "[": "]"}
_WORDS = {"none": "null", "null": "null", "true": "true", "false": "false"}
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")


@dataclass(frozen=True)
class Gemma(MarkedFormat):
    """Reasoning in the channel "thought", and such calls."""

    think: tuple[str, str] = ("<|channel>thought", "<channel|>")
    section: tuple[str, str] | None = None
    begins: tuple[str, ...] = ("<|tool_call>call:",)
    end: str = "<tool_call|>"

    @property
    def special_tokens(self) -> tuple[str, ...]:
        return ("<|channel>", self.think[1], "<|tool_call>", self.end, QUOTE)

    def call(self, message: Message, begin: str) -> Wait:
        """See ``MarkedFormat``. The arguments are given as JSON as they come; what has another form
        is given as it is, up to the end of the call."""
        reader = message.reader
        yield from reader.space()
        name = yield from reader.name()
        yield from reader.space()
        if not name or (yield from reader.next()) != "{":
            raise Broken
        message.start(name, random_id())
        if not (yield from self._value(message)):
            if not (yield from reader.until((self.end,), message.arguments)):
                return
            message.end()
            return
        message.end()
        yield from reader.space()
        yield from reader.take(self.end)

    def _value(self, message: Message) -> Generator[None, None, bool]:
        """Gives a value as JSON; False: it has no such form, or the text ends within it."""
        reader = message.reader
        first = yield from reader.next()
        if first in _CLOSES:
            return (yield from self._values(message, first, _CLOSES[first]))
        if text := (yield from self._quoted(message)):
            return text == "closed"
        pieces: list[str] = []
        end = yield from reader.until((",", "}", "]", self.end), pieces.append)
        reader.at -= len(end)
        word = "".join(pieces).strip()
        if not end or not word:
            message.arguments("".join(pieces))
            return False
        known = _WORDS.get(word.lower(), word if _NUMBER.fullmatch(word) else to_json(word))
        message.arguments(known)
        return True

    def _values(self, message: Message, opening: str, closing: str) -> Generator[None, None, bool]:
        """An object or an array, from its bracket on."""
        reader, separator = message.reader, ""
        yield from reader.take(opening)
        message.arguments(opening)
        while True:
            yield from reader.space()
            if (yield from reader.take(closing)):
                message.arguments(closing)
                return True
            if separator and not (yield from reader.take(",")):
                return False
            yield from reader.space()
            message.arguments(separator)
            if opening == "{" and not (yield from self._key(message)):
                return False
            if not (yield from self._value(message)):
                return False
            separator = ", "

    def _key(self, message: Message) -> Generator[None, None, bool]:
        reader = message.reader
        if not (yield from self._quoted(message)):
            pieces: list[str] = []
            end = yield from reader.until((":", "}", self.end), pieces.append)
            reader.at -= len(end)
            if end != ":":
                message.arguments("".join(pieces))
                return False
            message.arguments(to_json("".join(pieces).strip()))
        yield from reader.space()
        if not (yield from reader.take(":")):
            return False
        message.arguments(": ")
        yield from reader.space()
        return True

    def _quoted(self, message: Message) -> Generator[None, None, str]:
        """A text between quotes, or one that is written as JSON: "closed", or "open" where the
        text ends within it; "" if there is none."""
        reader = message.reader
        if (yield from reader.take(QUOTE)):
            message.arguments('"')
            closed = yield from reader.until(
                (QUOTE,), lambda text: message.arguments(json.dumps(text, ensure_ascii=False)[1:-1])
            )
            message.arguments('"' if closed else "")
            return "closed" if closed else "open"
        if (yield from reader.next()) != '"':
            return ""
        yield from reader.take('"')
        pieces = ['"']
        while True:
            closed = yield from reader.until(('"',), pieces.append)
            text = "".join((*pieces, closed))
            if not closed:
                return "open"
            pieces.append(closed)
            try:
                message.arguments(to_json(from_json(text)))
            except ValueError:
                continue  # the quote was escaped
            return "closed"
