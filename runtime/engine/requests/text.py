"""Text of a token stream, without any part of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol


class Detokenizer(Protocol):
    """Incremental detokenization of one sequence; see ``model.text.detokenize``."""

    def push(self, token: int) -> str:
        """The text that ``token`` completes."""
        ...

    def finish(self) -> str:
        """The rest, when no token follows."""
        ...


MakeDetokenizer = Callable[[], Detokenizer]


class StopFilter:
    """Passes text on up to the first stop string, and holds back what may become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self.held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """What of the text so far can be shown now, and whether a stop string came."""
        text = self.held + text
        matches = [at for stop in self.stops if (at := text.find(stop)) >= 0]
        if matches:
            self.held = ""
            return text[: min(matches)], True
        keep = max((_overlap(text, stop) for stop in self.stops), default=0)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def finish(self) -> str:
        """What was held back: no stop string came of it."""
        text, self.held = self.held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0


class TextStream:
    """Text of one output, token by token."""

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str] = ()) -> None:
        self.detokenizer = detokenizer
        self.filter = StopFilter(stops) if stops else None
        self.deltas: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self.deltas)

    def push(self, token: int, check: bool = True) -> tuple[str, bool]:
        """The text to show, and whether a stop string ended it; looked for if ``check``."""
        text, stopped = self.detokenizer.push(token), False
        if self.filter is not None and check:
            text, stopped = self.filter.push(text)
        return self._shown(text), stopped

    def finish(self) -> tuple[str, bool]:
        """The rest of the text, and whether it held a stop string."""
        text, stopped = self.detokenizer.finish(), False
        if self.filter is not None:
            text, stopped = self.filter.push(text)
            text += self.filter.finish()
        return self._shown(text), stopped

    def _shown(self, text: str) -> str:
        if text:
            self.deltas.append(text)
        return text
