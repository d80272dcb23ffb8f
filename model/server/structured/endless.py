"""Schemas that no finite value satisfies: a ``$ref`` that leads to itself for ever."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

_ROUNDS = 64
"""Through all schemas, until nothing changes; what is open then is taken for finite."""


def has_finite_value(root: Mapping[str, Any]) -> bool:
    """Whether some value of finite length may satisfy a schema, as far as its ``$ref`` tell."""
    nodes = _schemas(root)
    if not any("$ref" in node for node in nodes):
        return True
    finite: set[int] = set()
    for _ in range(_ROUNDS):
        new = [id(n) for n in nodes if id(n) not in finite and _ends(n, root, finite)]
        if not new:
            return id(root) in finite
        finite.update(new)
        if id(root) in finite:
            return True
    return True


def _schemas(root: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """All mappings: some are no schemas, which does no harm."""
    schemas, left = [], [root]
    while left:
        value: Any = left.pop()
        if isinstance(value, Mapping):
            schemas.append(value)
            left += value.values()
        elif isinstance(value, list):
            left += value
    return schemas


def _ends(node: Mapping[str, Any], root: Mapping[str, Any], finite: set[int]) -> bool:
    def done(schema: Any) -> bool:
        return not isinstance(schema, Mapping) or id(schema) in finite

    if "const" in node or "enum" in node:
        return True
    if isinstance(node.get("$ref"), str) and not done(_target(root, node["$ref"])):
        return False
    for key, enough in (("allOf", all), ("anyOf", any), ("oneOf", any)):
        choices = node.get(key)
        if isinstance(choices, list) and choices and not enough(map(done, choices)):
            return False
    if node.get("type") == "object":
        properties, required = node.get("properties"), node.get("required")
        if isinstance(properties, Mapping) and isinstance(required, list):
            return all(done(properties.get(n)) for n in required if isinstance(n, str))
    if node.get("type") == "array" and isinstance(least := node.get("minItems"), int):
        first = node.get("prefixItems")
        first = first[:least] if isinstance(first, list) else []
        return all(map(done, first)) and (least <= len(first) or done(node.get("items")))
    return True


def _target(root: Mapping[str, Any], reference: str) -> Any:
    """What a reference into the document stands for; None of any other, and of a wrong one."""
    if not reference.startswith("#"):
        return None
    target: Any = root
    for part in reference[1:].strip("/").split("/"):
        if part == "":
            continue
        if isinstance(target, list) and part.isdecimal() and int(part) < len(target):
            target = target[int(part)]
        elif isinstance(target, Mapping):
            plain = unquote(part).replace("~1", "/").replace("~0", "~")
            target = target.get(part, target.get(plain))
        else:
            return None
    return target
