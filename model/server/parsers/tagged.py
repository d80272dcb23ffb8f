"""Calls whose name and JSON arguments stand between special tokens: DeepSeek, Kimi."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass

from .marked import MarkedFormat
from .message import Broken, Message
from .reader import Wait


def random_id() -> str:
    """An id of OpenAI's form."""
    return f"call_{secrets.token_hex(12)}"


def split_kimi_id(text: str) -> tuple[str, str]:
    """Name and id of a call of Kimi K2, which writes ``functions.NAME:NUMBER``. Its template wants
    to see this id again."""
    name, _, number = text.partition(":")
    whole = text.startswith("functions.") and number.isdecimal()
    return name.removeprefix("functions."), text if whole else random_id()


def named(text: str) -> tuple[str, str]:
    """Name and id where the model writes the name alone."""
    return text, random_id()


@dataclass(frozen=True)
class Tagged(MarkedFormat):
    """``begin prefix NAME separator ARGUMENTS suffix end``.

    White space between these parts may differ from the template's.

    Attributes:
        section: around all calls of a message.
        split: what the model writes as the name -> name and id.
        name_format: what it writes for a function ``{name}`` in call ``{index}``.
        between: what the template writes between two calls.
    """

    section: tuple[str, str] | None
    begins: tuple[str, ...]
    prefix: str
    separator: str
    suffix: str
    end: str
    split: Callable[[str], tuple[str, str]] = named
    name_format: str = "{name}"
    between: str = ""

    @property
    def special_tokens(self) -> tuple[str, ...]:
        inner = [s for s in (self.prefix.removeprefix("function"), self.separator) if s[:1] == "<"]
        return (*self.think, *(self.section or ()), *self.begins, *inner, self.end)

    def call(self, message: Message, begin: str) -> Wait:
        """See ``MarkedFormat``."""
        reader = message.reader
        yield from reader.space()
        if self.prefix and not (yield from reader.take(self.prefix)):
            raise Broken
        written = yield from reader.name()
        yield from reader.space()
        yield from reader.take(self.separator.strip())
        yield from reader.space()
        if not written or (yield from reader.next()) != "{":
            raise Broken
        name, call_id = self.split(written)
        message.start(name, call_id)
        if not (yield from message.json_arguments((self.end,), literal=True)):
            return
        message.end()
        yield from reader.space()
        if self.suffix:
            yield from reader.take(self.suffix.strip())
            yield from reader.space()
        yield from reader.take(self.end)


DEEPSEEK_V3 = Tagged(
    section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    begins=("<｜tool▁call▁begin｜>",),
    prefix="function<｜tool▁sep｜>",
    separator="\n```json\n",
    suffix="\n```",
    end="<｜tool▁call▁end｜>",
    between="\n",
)
"""DeepSeek-V3, V3-0324 and R1."""

DEEPSEEK_V31 = Tagged(
    section=DEEPSEEK_V3.section,
    begins=DEEPSEEK_V3.begins,
    prefix="",
    separator="<｜tool▁sep｜>",
    suffix="",
    end=DEEPSEEK_V3.end,
)
"""DeepSeek-V3.1."""

KIMI_K2 = Tagged(
    section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    begins=("<|tool_call_begin|>",),
    prefix="",
    separator="<|tool_call_argument_begin|>",
    suffix="",
    end="<|tool_call_end|>",
    split=split_kimi_id,
    name_format="functions.{name}:{index}",
)
"""Kimi-K2, Instruct and Thinking."""
