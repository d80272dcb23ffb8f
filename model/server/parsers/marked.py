"""The state machine of all formats but gpt-oss's: reasoning, content, calls, and the way back."""

from __future__ import annotations

from abc import ABC, abstractmethod

from .message import Broken, Message
from .reader import Wait


class MarkedFormat(ABC):
    """Reasoning at the start between two markers, then text, and calls that begin with a marker.

    Attributes:
        think: the markers around the reasoning.
        section: the markers around all calls of a message, or None.
        begins: markers that begin a call.
    """

    think: tuple[str, str] = ("<think>", "</think>")
    section: tuple[str, str] | None
    begins: tuple[str, ...]

    @property
    @abstractmethod
    def special_tokens(self) -> tuple[str, ...]:
        """See ``message.Format``."""

    @abstractmethod
    def call(self, message: Message, begin: str) -> Wait:
        """Reads a call behind its first marker.

        Raises:
            Broken: it is none, and nothing of it was given.
        """

    def read(self, message: Message, prompt_tail: str) -> Wait:
        """See ``message.Format``.

        A call may end reasoning that was not closed. What looks like a call and is none is text of
        the channel in which it stands, and reading goes on behind its first marker.
        """
        reader, (opening, closing) = message.reader, self.think
        tail = prompt_tail.rstrip()
        if tail.endswith((opening, closing)):
            message.turn(reasoning=tail.endswith(opening))
        if not message.reasoning:
            yield from self._opening(message)
        section = self.section or ()
        calls = (*self.begins, *section) if message.tools else ()
        in_section = False
        while True:
            markers = (closing, *calls) if message.reasoning else calls
            marker = yield from reader.until(markers, message.write)
            if not marker:
                message.close()
                return
            if marker == closing:
                message.turn(reasoning=False)
            elif marker in section[1:]:
                if not in_section:
                    message.write(marker)
                in_section = False
            else:
                reader.mark = reader.at
                try:
                    yield from self._call(message, marker)
                    in_section = in_section or marker in section
                except Broken:
                    reader.at = reader.mark
                    message.write(marker)
                reader.mark = None

    def _call(self, message: Message, marker: str) -> Wait:
        if self.section and marker == self.section[0]:
            yield from message.reader.space()
            marker = yield from message.reader.take(*self.begins)
            if not marker:
                raise Broken
        yield from self.call(message, marker)

    def _opening(self, message: Message) -> Wait:
        """Reasoning begins where its marker is the first thing of the message."""
        reader = message.reader
        reader.mark = reader.at
        yield from reader.space()
        if (yield from reader.take(self.think[0])):
            message.turn(reasoning=True)
        else:
            reader.at = reader.mark
        reader.mark = None
