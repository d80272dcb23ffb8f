"""JSON whose text arrives in pieces, and JSON text of values."""

from __future__ import annotations

import json
import re
from typing import Any, Literal, NamedTuple

_OUTSIDE = re.compile(r'["{}\[\]]|[^\s,:+\-.\w]')
_INSIDE = re.compile(r'["\\\x00-\x1f]')
_CLOSES = {"}": "{", "]": "["}


class Scanned(NamedTuple):
    """What ``JsonScanner.scan`` found.

    Attributes:
        found: "end" of the object; "broken": a character that cannot be there; "more" is needed.
        at: behind the last bracket, or at that character, or the end of what was scanned.
        text: what was read before ``at``, control characters in strings written as JSON wants them.
    """

    found: Literal["more", "end", "broken"]
    at: int
    text: str


class JsonScanner:
    """Finds the end of an object. It knows strings and brackets; numbers and words are not checked.

    Args:
        depth: objects that are open before the first character.
    """

    def __init__(self, depth: int = 0) -> None:
        self._open = ["{"] * depth
        self._in_string = self._escaped = False

    def scan(self, text: str, start: int, stop: int) -> Scanned:
        """Reads ``text[start:stop]``, which follows what was read before."""
        pieces: list[str] = []
        done = at = start

        def scanned(found: Literal["more", "end", "broken"], at: int) -> Scanned:
            return Scanned(found, at, "".join((*pieces, text[done:at])))

        while at < stop:
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            match = (_INSIDE if self._in_string else _OUTSIDE).search(text, at, stop)
            if match is None:
                break
            found, at = match[0], match.end()
            if found == '"':
                self._in_string = not self._in_string
            elif self._in_string and found == "\\":
                self._escaped = True
            elif self._in_string:
                pieces += [text[done : match.start()], json.dumps(found)[1:-1]]
                done = at
            elif found in "{[":
                self._open.append(found)
            elif found in _CLOSES and self._open and self._open[-1] == _CLOSES[found]:
                self._open.pop()
                if not self._open:
                    return scanned("end", at)
            else:
                return scanned("broken", match.start())
        return scanned("more", stop)


def to_json(value: Any) -> str:
    """JSON text that any encoding can hold.

    Raises:
        ValueError: a value that JSON does not have.
        RecursionError: one that is nested too deeply.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return json.dumps(value)
    return text


def from_json(text: str) -> Any:
    """The value of a JSON text; control characters may stand in strings.

    Raises:
        ValueError: it is none, or nested too deeply.
    """
    try:
        return json.loads(text, strict=False)
    except RecursionError:
        raise ValueError("nested too deeply") from None
