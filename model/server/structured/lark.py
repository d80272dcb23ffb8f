"""Writes grammars in llguidance's variant of lark."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from .schema import enforceable
from .vocabulary import Vocabulary

_ANYTHING = r"/(.|\n)*/"
_SPACES = {"whitespace_flexible": True, "whitespace_pattern": r"[ \n\r\t]{0,20}"}
"""Bounded: a model that is unsure writes spaces for ever."""
_ESCAPES = {"json_allowed_escapes": 'nrbtf"\\'}
"""No \\u: a name written with it would not count as the one that is declared."""
_ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


class Lark:
    """A grammar under construction. Expressions are strings in lark.

    Args:
        markers: texts that are special tokens, where the vocabulary has them as such.
    """

    def __init__(self, vocabulary: Vocabulary, markers: Iterable[str]) -> None:
        tokens = {marker: vocabulary.special_token(marker) for marker in markers}
        self._ids = {marker: token for marker, token in tokens.items() if token is not None}
        longest = sorted(self._ids, key=len, reverse=True)
        self._split = re.compile("|".join(map(re.escape, longest)) or r"(?!)")
        self._rules: list[str] = []

    def rule(self, body: str, options: str = "") -> str:
        """Adds a rule; returns its name."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def any_of(self, choices: Iterable[str]) -> str:
        """A rule of alternatives."""
        return self.rule(" | ".join(choices))

    def text(self, text: str) -> str:
        """Exactly this text."""
        parts, at = [], 0
        for match in self._split.finditer(text):
            parts += [_quoted(text[at : match.start()]), f"<[{self._ids[match[0]]}]>"]
            at = match.end()
        return " ".join(p for p in (*parts, _quoted(text[at:])) if p)

    def until(self, end: str) -> str:
        """Any text up to the first ``end``, and that."""
        if match := self._split.search(end):
            # What stands before a special token is part of the text.
            return f"{_ANYTHING} {self.text(end[match.start() :])}"
        return self.rule(_ANYTHING, f"[suffix={json.dumps(end, ensure_ascii=False)}]")

    def json(self, schema: Mapping[str, Any], *, one_line: bool, strict: bool = False) -> str:
        """A JSON value.

        Args:
            one_line: without other white space than one space behind commas and colons.
            strict: a keyword that cannot be enforced is an error; else it is ignored.

        Raises:
            PykernelsError: a schema that cannot be enforced.
        """
        spaces = _ONE_LINE if one_line else _SPACES
        options = {**spaces, **_ESCAPES, "lenient": not strict}
        kept = enforceable(schema, strict)
        return self.rule(f"%json {json.dumps({**kept, 'x-guidance': options})}")

    def grammar(self, start: str) -> str:
        """The whole grammar."""
        return "\n".join((f"start: {start}", *self._rules))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
