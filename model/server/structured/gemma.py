"""Values of a JSON schema in Gemma 4's notation, as rules of a grammar."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..parsers.gemma import QUOTE
from ..parsers.values import types_of
from .lark import Lark

_DEEPEST = 3
"""Values within values that are written out as rules."""
_KEY = "/[A-Za-z0-9_.-]{1,64}:/"
_WORDS = r"/-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,15})?|true|false|null/"
_PLAIN = frozenset(("integer", "number", "boolean", "null"))


def notation(lark: Lark, schema: Any, root: Mapping[str, Any], depth: int = 0) -> str:
    """An expression for a value.

    Objects have their properties in the order of the template, which sorts them; those that are
    not required may be left out. What is nested deeply holds texts, numbers and words.

    Args:
        schema: of the value; ``root``: in which its definitions are.
    """
    schema = schema if isinstance(schema, Mapping) else {}
    definitions = {k: v for k, v in root.items() if k in ("$defs", "definitions")}
    types = types_of({"properties": {"x": schema}, **definitions}, "x")
    quote, options = lark.text(QUOTE), schema.get("enum")
    if isinstance(options, list) and options and all(isinstance(o, str) for o in options):
        return lark.rule(f"{quote} ({' | '.join(map(lark.text, options))}) {quote}")
    text = f"{quote} {lark.until(QUOTE)}"
    if types == {"string"}:
        return lark.rule(text)
    if types and types <= _PLAIN:
        return lark.json({**schema, **definitions}, one_line=True)
    if types == {"object"} and (depth == 0 or schema.get("properties")):
        return _braces(lark, _members(lark, schema, root, depth))
    if depth == _DEEPEST:
        return lark.rule(f"{text} | {_WORDS}")
    item = notation(lark, schema.get("items"), root, depth + 1)
    array = lark.rule(f"{lark.text('[')} {_listed(lark, item)} {lark.text(']')}")
    if types == {"array"}:
        return array
    inner = notation(lark, {}, root, depth + 1)
    pairs = _braces(lark, _listed(lark, f"{_KEY} {inner}"))
    return pairs if types == {"object"} else lark.rule(f"{text} | {_WORDS} | {array} | {pairs}")


def _braces(lark: Lark, members: str) -> str:
    return lark.rule(f"{lark.text('{')} {members} {lark.text('}')}")


def _listed(lark: Lark, one: str) -> str:
    return f"({one} ({lark.text(',')} {one})*)?"


def _members(lark: Lark, schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> str:
    properties, required = schema.get("properties", {}), schema.get("required", ())
    keys = sorted(properties, key=str.lower)
    each = [
        f"{lark.text(f'{key}:')} {notation(lark, properties[key], root, depth + 1)}" for key in keys
    ]
    found, rest = list[str](), ""
    for i, key in reversed(list(enumerate(keys))):
        if not any(earlier in required for earlier in keys[:i]):
            found.append(f"{each[i]} {rest}")  # as the first one
        more = f"({lark.text(',')} {each[i]})"
        rest = f"{more if key in required else f'{more}?'} {rest}"
    if not found:
        return ""
    body = lark.any_of(found)
    return body if any(key in required for key in keys) else f"({body})?"
