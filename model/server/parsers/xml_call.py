"""Calls with a tag for each parameter: GLM-4.5 to 4.7, Qwen3-Coder, MiniMax-M2.

Values are plain text there; what they are in JSON is what the tool's schema says.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

from .json_text import to_json
from .marked import MarkedFormat
from .message import Broken, Message
from .reader import Wait
from .tagged import random_id
from .values import as_json, parameters_of, types_of

_STRING = frozenset({"string"})


@dataclass(frozen=True)
class XmlCall(MarkedFormat):
    """``begin name_open NAME name_close (key_open KEY key_close value_open VALUE value_close)*
    close end``, with any white space between the parts.

    Attributes:
        begins: ``begin``, and other markers that a call may begin with.
        close: behind the last parameter.
        lines: values stand on lines of their own: a line break on both sides is not theirs.
        also_ends: what ends a value whose ``value_close`` the model forgot; it is read again.
        space: what the template writes between the parts.
    """

    begins: tuple[str, ...]
    name_open: str
    name_close: str
    key_open: str
    key_close: str
    value_open: str
    value_close: str
    close: str
    end: str
    section: tuple[str, str] | None = None
    lines: bool = False
    also_ends: tuple[str, ...] = ()
    space: str = "\n"

    @property
    def special_tokens(self) -> tuple[str, ...]:
        markers = (*self.begins, *(self.section or ()), self.key_open, self.key_close)
        more = (self.value_open, self.value_close, self.close, self.end)
        tags = [m for m in (*markers, *more) if m.startswith("<") and m.endswith(">")]
        return (*self.think, *dict.fromkeys(tags))

    def call(self, message: Message, begin: str) -> Wait:
        """See ``MarkedFormat``."""
        reader = message.reader
        if begin != self.name_open:
            yield from reader.space()
            if self.name_open and not (yield from reader.take(self.name_open)):
                raise Broken
        name = yield from reader.name()
        if not name or (self.name_close and not (yield from reader.take(self.name_close))):
            raise Broken
        yield from reader.space()
        part = yield from reader.take(self.key_open, self.close)
        if not part:
            raise Broken
        message.start(name, random_id())
        parameters, separator = parameters_of(message.tools, name), "{"
        while part == self.key_open:
            key = yield from _collect(message, (self.key_close,))
            if key is None:
                return
            if self.value_open:
                yield from reader.space()
                yield from reader.take(self.value_open)
            message.arguments(f"{separator}{to_json(key.strip())}: ")
            if not (yield from self._value(message, types_of(parameters, key.strip()))):
                return
            separator = ", "
            part = yield from reader.until((self.key_open, self.close), _nothing)
        if not part:
            return
        message.arguments("{}" if separator == "{" else "}")
        message.end()
        if self.end:
            yield from reader.space()
            yield from reader.take(self.end)

    def _value(self, message: Message, types: frozenset[str]) -> Generator[None, None, bool]:
        """False if the text ended within the value."""
        ends = (self.value_close, *self.also_ends)
        if types != _STRING:
            text = yield from _collect(message, ends, self)
            if text is not None:
                message.arguments(as_json(_inner(text) if self.lines else text, types))
            return text is not None
        message.arguments('"')
        sink = _StringSink(message, self.lines)
        end = yield from message.reader.until(ends, sink)
        self.back(message, end)
        if end:
            message.arguments('"')
        return bool(end)

    def back(self, message: Message, end: str) -> None:
        """Reads an end again that belongs to what follows."""
        if end and end != self.value_close:
            message.reader.at -= len(end)


class _StringSink:
    """Gives pieces of text as the inside of a JSON string."""

    def __init__(self, message: Message, lines: bool) -> None:
        self.message, self.lines = message, lines
        self._first, self._held = lines, ""

    def __call__(self, text: str) -> None:
        if self._first:
            text, self._first = text.removeprefix("\n"), False
        text = self._held + text
        self._held = "\n" if self.lines and text.endswith("\n") else ""
        text = text[: len(text) - len(self._held)]
        self.message.arguments(to_json(text)[1:-1])


def _inner(text: str) -> str:
    return text.removeprefix("\n").removesuffix("\n")


def _nothing(text: str) -> None:
    """Text between two parameters is dropped."""


def _collect(
    message: Message, ends: tuple[str, ...], form: XmlCall | None = None
) -> Generator[None, None, str | None]:
    """The text up to one of ``ends``; None if the whole text ends before."""
    pieces: list[str] = []
    end = yield from message.reader.until(ends, pieces.append)
    if form is not None:
        form.back(message, end)
    return "".join(pieces) if end else None


GLM_45 = XmlCall(
    begins=("<tool_call>",),
    name_open="",
    name_close="",
    key_open="<arg_key>",
    key_close="</arg_key>",
    value_open="<arg_value>",
    value_close="</arg_value>",
    close="</tool_call>",
    end="",
)
"""GLM-4.5 and 4.6."""

GLM_47 = XmlCall(**{**GLM_45.__dict__, "space": ""})
"""GLM-4.7: the same without line breaks."""

QWEN3_CODER = XmlCall(
    begins=("<tool_call>", "<function="),
    name_open="<function=",
    name_close=">",
    key_open="<parameter=",
    key_close=">",
    value_open="",
    value_close="</parameter>",
    close="</function>",
    end="</tool_call>",
    lines=True,
    also_ends=("\n<parameter=", "</function>\n</tool_call>"),
)
"""Qwen3-Coder and Qwen3.5. They sometimes leave out <tool_call>, or the end of a value."""

MINIMAX_M2 = XmlCall(
    begins=('<invoke name="',),
    name_open='<invoke name="',
    name_close='">',
    key_open='<parameter name="',
    key_close='">',
    value_open="",
    value_close="</parameter>",
    close="</invoke>",
    end="",
    section=("<minimax:tool_call>", "</minimax:tool_call>"),
)
"""MiniMax-M2."""
