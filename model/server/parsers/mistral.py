"""Mistral's calls: a JSON array (up to Nemo and Small 3.1), or names with arguments (later)."""

from __future__ import annotations

import secrets
import string
from dataclasses import dataclass

from .json_call import json_call
from .marked import MarkedFormat
from .message import Broken, Message
from .reader import Wait

_LETTERS = string.ascii_letters + string.digits


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
