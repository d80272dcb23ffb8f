"""JSON schemas as llguidance keeps to them: what it would drop or bend is refused, or said so that
whatever it lets pass is valid."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pykernels.errors import PykernelsError

from .endless import has_finite_value

_EXACT = 1 << 53
"""Up to here doubles hold whole numbers, of which llguidance makes all."""
_DEPTH, _SIZE = 100, 50_000
"""Most nested lists and objects, and most values: about what llguidance takes."""
_DIVISOR = 1 << 16
"""Largest ``multipleOf`` in units of its last decimal: an automaton has as many states."""
_STEP = 1e-9

_DROPPED = frozenset(
    {
        "$dynamicRef",
        "$recursiveRef",
        "contains",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "else",
        "if",
        "maxContains",
        "minContains",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
        "uniqueItems",
    }
)
"""Keywords of any draft that restrict values, and that llguidance does not have."""
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_FORMATS = frozenset(
    "date date-time duration email hostname ipv4 ipv6 time uri uuid".split()  # in llguidance
)
_IN_PLACE = ("$ref", "allOf", "anyOf", "oneOf")
_ONE = ("additionalItems", "additionalProperties", "items")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS = ("$defs", "definitions", "patternProperties", "properties")
_NAMES = re.compile(r"\^(?:\((?:\?:)?([\w|-]+)\)|([\w-]+))\$")
"""A pattern that is a list of names."""
_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
"""What JSON can write as \\u only, which the grammar has not: llguidance would leave it out."""
_CLASSES = re.compile(r"\\\\|\[(?:\\.|[^\]\\])*\]", re.DOTALL)
_CONTROL_ESCAPE = re.compile(r"\\(?:x[01]|x7[fF]|u00[01]|u007[fF]|[acev0])")


def enforceable(schema: Mapping[str, Any], strict: bool) -> dict[str, Any]:
    """A schema whose values are values of the one given, for llguidance.

    Args:
        strict: what cannot be enforced is an error; else it is left out, or llguidance leaves it.

    Raises:
        PykernelsError: also a schema too deep or too large, a number that is not exact, and one
            without a value of finite length.
    """
    _check_size(schema)
    if not has_finite_value(schema):
        raise _Refused("#", "a $ref that leads to itself for ever, so that no value ends")
    enforced = _Walk(strict).node(schema, "#", False)
    assert isinstance(enforced, dict)
    return enforced


class _Refused(PykernelsError):
    def __init__(self, where: str, what: str, hint: str = "Simplify the schema") -> None:
        super().__init__(f"this structure cannot be enforced: {where[:200]} has {what}", hint)


def _check_size(schema: Any) -> None:
    left, size = [(schema, 0)], 0
    while left:
        value, depth = left.pop()
        size += 1
        if depth > _DEPTH or size > _SIZE:
            limit = f"over {_DEPTH} levels" if depth > _DEPTH else f"over {_SIZE} values"
            raise _Refused("the schema", limit)
        if isinstance(value, Mapping | list):
            inner = value.values() if isinstance(value, Mapping) else value
            left += [(one, depth + 1) for one in inner]


class _Walk:
    def __init__(self, strict: bool) -> None:
        self._strict = strict

    def node(self, given: Any, where: str, joined: bool) -> Any:
        """A copy of a schema.

        Args:
            where: it stands, as a JSON pointer.
            joined: llguidance may merge it with another one.
        """
        if not isinstance(given, Mapping):
            return given
        node = dict(given)
        node.pop("$schema", None)  # the keywords of all drafts count
        if node.get("uniqueItems") is False:
            del node["uniqueItems"]
        if self._strict:
            self._check_keywords(node, where)
        self._expand_names(node)
        for key in ("const", "enum"):
            _check_values(node.get(key), f"{where}/{key}")
        self._check_patterns(node, where)
        self._divisor(node, where)
        _bounds(node, where)
        self._counts(node, where, joined or any(key in node for key in _IN_PLACE))
        for key, child, place in _children(node):
            one = self.node(
                child, f"{where}/{key}" + ("" if place is None else f"/{place}"), key in _IN_PLACE
            )
            if place is None:
                node[key] = one
            else:
                node[key][place] = one
        return node

    def _unenforced(self, node: dict[str, Any], where: str, key: str, why: str = "") -> None:
        """Leaves a keyword out, or refuses it."""
        if self._strict:
            hint = "Leave it out, or ask without strict"
            raise _Refused(where, f"{key}{why and f' {why}'}", hint)
        node.pop(key, None)

    def _check_keywords(self, node: dict[str, Any], where: str) -> None:
        for key in node:
            if key in _DROPPED:
                self._unenforced(node, where, key)
        if isinstance(name := node.get("format"), str) and name not in _FORMATS:
            self._unenforced(node, where, f"the format {name[:60]!r}")
        for key in ("exclusiveMinimum", "exclusiveMaximum"):
            if isinstance(node.get(key), bool):
                self._unenforced(node, where, key, "that is no number")
        beside = {"prefixItems", *_IN_PLACE} & node.keys()
        if "additionalItems" in node and beside:
            self._unenforced(node, where, "additionalItems", f"beside {min(beside)}")

    def _check_patterns(self, node: dict[str, Any], where: str) -> None:
        if _has_control(node.get("pattern")):
            self._unenforced(node, where, "pattern", "with a control character")
        if isinstance(patterns := node.get("patternProperties"), Mapping):
            if any(map(_has_control, patterns)):
                self._unenforced(node, where, "patternProperties", "with a control character")

    def _expand_names(self, node: dict[str, Any]) -> None:
        """Patterns that are lists of names, all of them declared: llguidance would go on for
        further names, and find none."""
        patterns, declared = node.get("patternProperties"), node.get("properties", {})
        required = node.get("required", [])
        if not (
            isinstance(patterns, Mapping)
            and isinstance(declared, Mapping)
            and isinstance(required, list)
        ):
            return
        patterns, declared = dict(patterns), dict(declared)
        for pattern in list(patterns):
            match = _NAMES.fullmatch(pattern)
            names = (match[1] or match[2]).split("|") if match else []
            if names and all(name in declared or name in required for name in names):
                schema = patterns.pop(pattern)
                for name in names:
                    own = declared.get(name)
                    declared[name] = schema if own is None else {"allOf": [own, schema]}
        node |= {"patternProperties": patterns, "properties": declared}

    def _divisor(self, node: dict[str, Any], where: str) -> None:
        step = node.get("multipleOf")
        if isinstance(step, bool) or not isinstance(step, int | float) or step <= 0:
            return
        unit = float(step)
        while unit % 1 and unit < _DIVISOR:
            unit *= 10
        if unit >= _DIVISOR:
            self._unenforced(node, where, "multipleOf", f"{step}")
        elif step % 1 and ("const" in node or "enum" in node):
            self._unenforced(node, where, "multipleOf", "beside const or enum")

    def _counts(self, node: dict[str, Any], where: str, joined: bool) -> None:
        """``minProperties`` and ``maxProperties``, which llguidance counts where only names beyond
        ``properties`` are free, and where names that come twice count twice."""
        least, most = node.get("minProperties"), node.get("maxProperties")
        if type(least) is not int and type(most) is not int:
            return
        properties, required = node.get("properties") or {}, node.get("required") or []
        must = len(set(map(str, required)))
        closed = node.get("additionalProperties") is False and not node.get("patternProperties")
        if type(least) is int and least > must + 1 and not closed:
            self._unenforced(node, where, "minProperties", "beyond the required ones and one more")
        elif not self._strict:
            free = any(name not in required for name in properties)
            of_one = closed and (least or 0) <= must + 1 and most in (None, must + 1)
            if joined or (free and not of_one):
                node.pop("minProperties", None)
                node.pop("maxProperties", None)


def _children(node: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """The schemas in a schema: keyword, schema, and its place under the keyword. Makes the lists
    and mappings that hold them its own."""
    for key in _ONE:
        if isinstance(node.get(key), Mapping):
            yield key, node[key], None
    for key in _LISTS:
        if isinstance(node.get(key), list):
            node[key] = list(node[key])
            yield from ((key, child, i) for i, child in enumerate(list(node[key])))
    for key in _MAPS:
        if isinstance(node.get(key), Mapping):
            node[key] = dict(node[key])
            yield from ((key, child, name) for name, child in list(node[key].items()))


def _has_control(pattern: Any) -> bool:
    if not isinstance(pattern, str):
        return False
    rest = _CLASSES.sub("", pattern)
    return bool(_CONTROL.search(rest) or _CONTROL_ESCAPE.search(rest))


def _check_values(value: Any, where: str) -> None:
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, Mapping | list):
            left += one.values() if isinstance(one, Mapping) else one
        elif isinstance(one, int) and abs(one) > _EXACT:
            raise _Refused(where, f"a whole number beyond 2**53: {str(one)[:60]}", "Use a string")
        elif isinstance(one, str) and _CONTROL.search(one):
            raise _Refused(where, "a control character", "Leave it out")


def _bounds(node: dict[str, Any], where: str) -> None:
    """Bounds of numbers: within what is exact."""
    for key in (*_LOWER, *_UPPER):
        for value in _numbers(node, key):
            if abs(value) <= _EXACT:
                continue
            if (value < 0) != (key in _LOWER):
                raise _Refused(where, f"{key} beyond 2**53: {str(value)[:60]}")
            node[key] = _EXACT if value > 0 else -_EXACT
    # A whole exclusive bound, the other bound in reach: llguidance would let the bound itself pass.
    for low in _numbers(node, "exclusiveMinimum"):
        if low % 1 == 0 <= low and min(_numbers(node, *_UPPER), default=math.inf) < low + 1:
            node["exclusiveMinimum"] = max(low + _STEP, math.nextafter(low, math.inf))
    for high in _numbers(node, "exclusiveMaximum"):
        if high % 1 == 0 >= high and max(_numbers(node, *_LOWER), default=-math.inf) > high - 1:
            node["exclusiveMaximum"] = min(high - _STEP, math.nextafter(high, -math.inf))


def _numbers(node: dict[str, Any], *keys: str) -> list[float]:
    values = [node.get(key) for key in keys]
    return [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
