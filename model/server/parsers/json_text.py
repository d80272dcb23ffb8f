"""Finds the end of a JSON object whose text arrives in pieces."""

from __future__ import annotations

import re
from typing import Literal

Found = Literal["more", "end", "broken"]

_OUTSIDE = re.compile(r'["{}\[\]]|[^\s,:+\-.\w]')
_INSIDE = re.compile(r'["\\]')
_CLOSES = {"}": "{", "]": "["}


class JsonScanner:
    """Knows strings and brackets; numbers and words are not checked.

    Args:
        depth: objects that are open before the first character.
    """

    def __init__(self, depth: int = 0) -> None:
        self._open = ["{"] * depth
        self._in_string = self._escaped = False

    def scan(self, text: str, start: int, stop: int) -> tuple[Found, int]:
        """Reads ``text[start:stop]``, which follows what was read before.

        Returns:
            "end" and the place behind the last bracket; "broken" and the place of a character that
            cannot be there; or "more" and ``stop``.
        """
        while start < stop:
            if self._escaped:
                self._escaped = False
                start += 1
                continue
            match = (_INSIDE if self._in_string else _OUTSIDE).search(text, start, stop)
            if match is None:
                break
            found, start = match[0], match.end()
            if found == '"':
                self._in_string = not self._in_string
            elif found == "\\" and self._in_string:
                self._escaped = True
            elif found in "{[":
                self._open.append(found)
            elif found in _CLOSES and self._open and self._open[-1] == _CLOSES[found]:
                self._open.pop()
                if not self._open:
                    return "end", start
            else:
                return "broken", match.start()
        return "more", stop
