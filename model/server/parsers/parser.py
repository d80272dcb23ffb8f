"""The interface of all parsers, and what runs a family's format."""

from __future__ import annotations

from typing import Protocol

from .message import Event, Format, Message, Tools
from .reader import Reader


class StreamParser(Protocol):
    """Parses one message."""

    def feed(self, text: str) -> list[Event]:
        """Takes the next piece of text, of any length; gives what is certain by now."""
        ...

    def close(self) -> list[Event]:
        """The text has ended: gives what was held back."""
        ...


class Parser(Protocol):
    """A family's format."""

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Tokens that the format's markers consist of, where the vocabulary has them; a
        detokenizer must not leave them out of the text."""
        ...

    def stream(self, prompt_tail: str = "", tools: Tools | None = None) -> StreamParser:
        """A parser of one message.

        Args:
            prompt_tail: the end of the rendered prompt: some templates begin the model's reasoning
                there. 100 characters are enough.
            tools: the request's. Without them no text becomes a call.
        """
        ...


class FormatParser:
    """A parser of a format.

    Attributes:
        form: the format.
        reasons: whether the model's template has reasoning.
    """

    def __init__(self, form: Format, *, reasons: bool = False) -> None:
        self.form, self.reasons = form, reasons

    @property
    def special_tokens(self) -> tuple[str, ...]:
        return self.form.special_tokens

    def stream(self, prompt_tail: str = "", tools: Tools | None = None) -> StreamParser:
        return _Stream(self.form, prompt_tail, tools)


class _Stream:
    def __init__(self, form: Format, prompt_tail: str, tools: Tools | None) -> None:
        self._message = Message(Reader(), tools)
        self._reading = form.read(self._message, prompt_tail)
        next(self._reading)  # it waits for the first text

    def feed(self, text: str) -> list[Event]:
        return self._resume(text) if text else []

    def close(self) -> list[Event]:
        if self._message.reader.ended:
            return []
        self._message.reader.ended = True
        return self._resume("")

    def _resume(self, text: str) -> list[Event]:
        message = self._message
        message.reader.feed(text)
        next(self._reading, None)
        events, message.events = message.events, []
        return events
