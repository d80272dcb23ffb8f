"""The interface of all parsers, and the one that leaves text as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from .events import Content, Event

Tools = Sequence[Mapping[str, Any]]
"""As OpenAI's ``tools``: ``{"type": "function", "function": {"name", "parameters"}}``."""


class StreamParser(Protocol):
    """Parses one message."""

    def feed(self, text: str) -> list[Event]:
        """Takes the next piece of text, of any length; gives what is certain by now."""
        ...

    def close(self) -> list[Event]:
        """The text has ended: gives what was held back."""
        ...


class Parser(Protocol):
    """A family's format.

    Attributes:
        special_tokens: tokens that the format's markers consist of; a detokenizer must not leave
            them out of the text.
    """

    special_tokens: tuple[str, ...]

    def stream(self, prompt_tail: str = "", tools: Tools | None = None) -> StreamParser:
        """A parser of one message.

        Args:
            prompt_tail: the end of the rendered prompt: some templates begin the model's reasoning
                there.
            tools: the request's. Without them no text becomes a call.
        """
        ...


class PlainParser:
    """Of models without a format: all text is content."""

    special_tokens: tuple[str, ...] = ()

    def stream(self, prompt_tail: str = "", tools: Tools | None = None) -> StreamParser:
        return _Plain()


class _Plain:
    def feed(self, text: str) -> list[Event]:
        return [Content(text)] if text else []

    def close(self) -> list[Event]:
        return []
