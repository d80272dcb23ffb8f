"""Reads text that arrives in pieces.

What reads is a generator: it yields where it needs more text and is resumed when that has come.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from functools import cache

Wait = Generator[None, None, None]
Sink = Callable[[str], None]

LONGEST_NAME = 256
_NAME = re.compile(r"[\w.\-/:$]*")


class Reader:
    """A text of which a part is here.

    Attributes:
        text: what is here and not yet dropped.
        at: where reading goes on in ``text``.
        ended: no more text will come.
        mark: a place to which the reader may go back, or None.
    """

    def __init__(self, text: str = "") -> None:
        self.text, self.at, self.ended = text, 0, False
        self.mark: int | None = None

    def feed(self, text: str) -> None:
        """Adds text and drops what was read, unless it is behind the mark."""
        done = self.at if self.mark is None else self.mark
        self.text = self.text[done:] + text
        self.at -= done
        if self.mark is not None:
            self.mark = 0

    def space(self) -> Wait:
        """Skips white space."""
        while True:
            while self.at < len(self.text) and self.text[self.at].isspace():
                self.at += 1
            if self.at < len(self.text) or self.ended:
                return
            yield

    def next(self) -> Generator[None, None, str]:
        """The next character, which is not consumed; "" at the end."""
        while self.at == len(self.text) and not self.ended:
            yield
        return self.text[self.at : self.at + 1]

    def take(self, *literals: str) -> Generator[None, None, str]:
        """Consumes the literal that comes next and returns it; "" if none does."""
        while True:
            waiting = False
            for literal in literals:
                here = self.text[self.at : self.at + len(literal)]
                if here == literal:
                    self.at += len(literal)
                    return literal
                waiting = waiting or literal.startswith(here)
            if self.ended or not waiting:
                return ""
            yield

    def name(self) -> Generator[None, None, str]:
        """Consumes letters, digits and ``_.-/:$``; "" if none comes, or too many."""
        while True:
            match = _NAME.match(self.text, self.at)
            assert match is not None
            if match.end() - self.at > LONGEST_NAME:
                return ""
            if match.end() < len(self.text) or self.ended:
                self.at = match.end()
                return match[0]
            yield

    def until(self, ends: tuple[str, ...], sink: Sink) -> Generator[None, None, str]:
        """Gives text to ``sink`` up to the first of ``ends``, which is consumed and returned; ""
        at the end of the text. What may be the beginning of one of them is held back."""
        pattern = any_of(ends)
        while True:
            if hit := pattern.search(self.text, self.at):
                self._give(hit.start(), sink)
                self.at = hit.end()
                return hit[0]
            self._give(self.certain(ends), sink)
            if self.ended:
                return ""
            yield

    def certain(self, ends: tuple[str, ...]) -> int:
        """Where the longest end of the text begins that may become one of ``ends``."""
        if self.ended:
            return len(self.text)
        size = min(max(map(len, ends), default=1) - 1, len(self.text) - self.at)
        for start in range(len(self.text) - size, len(self.text)):
            tail = self.text[start:]
            if any(end.startswith(tail) for end in ends):
                return start
        return len(self.text)

    def _give(self, stop: int, sink: Sink) -> None:
        if stop > self.at:
            sink(self.text[self.at : stop])
            self.at = stop


@cache
def any_of(literals: tuple[str, ...]) -> re.Pattern[str]:
    """Finds the first of some literals, the longest where several begin."""
    if not literals:
        return re.compile(r"(?!)")
    return re.compile("|".join(map(re.escape, sorted(literals, key=len, reverse=True))))
