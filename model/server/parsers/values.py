"""Arguments that a model writes as plain text, as JSON of the type that the tool declares."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Mapping
from typing import Any

from .json_text import from_json, to_json
from .message import Tools

_OF_PYTHON = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
    type(None): "null",
}


def parameters_of(tools: Tools, name: str) -> Mapping[str, Any]:
    """The schema of a tool's arguments; empty if it is not known."""
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("name") == name and isinstance(function.get("parameters"), Mapping):
            return function["parameters"]
    return {}


def types_of(parameters: Mapping[str, Any], name: str) -> frozenset[str]:
    """The JSON types that a parameter may have; empty if the schema does not say."""
    properties = parameters.get("properties")
    schema = properties.get(name) if isinstance(properties, Mapping) else None
    return frozenset(_types(schema, parameters, 0))


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> set[str]:
    if not isinstance(schema, Mapping) or depth > 16:
        return set()
    if isinstance(reference := schema.get("$ref"), str):
        target: Any = root
        for part in reference.removeprefix("#").strip("/").split("/"):
            target = target.get(part) if isinstance(target, Mapping) else None
        return _types(target, root, depth + 1)
    declared = schema.get("type")
    if isinstance(declared, str):
        types = {declared}
    elif isinstance(declared, list):
        types = {t for t in declared if isinstance(t, str)}
    elif "const" in schema or isinstance(schema.get("enum"), list):
        values = [schema["const"]] if "const" in schema else schema["enum"]
        types = {_OF_PYTHON.get(type(value), "string") for value in values}
    else:
        choices = [c for key in ("anyOf", "oneOf", "allOf") for c in _listed(schema.get(key))]
        types = {t for choice in choices for t in _types(choice, root, depth + 1)}
    return types | ({"null"} if schema.get("nullable") else set())


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def as_json(text: str, types: frozenset[str]) -> str:
    """JSON text of a value, of the first of its types that the text can have; else a string."""
    bare = text.strip()
    if "null" in types and bare in ("null", "None"):
        return "null"
    if "boolean" in types and bare.lower() in ("true", "false"):
        return bare.lower()
    value = _value(bare)
    kinds = {"object": dict, "array": list}
    if any(t in types and isinstance(value, kind) for t, kind in kinds.items()):
        return to_json(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if "integer" in types and is_number and value == value // 1:
        return to_json(int(value))
    if "number" in types and is_number:
        return to_json(value)
    if not types and value is not None and not isinstance(value, str):
        return to_json(value)
    if not types and bare == "null":
        return "null"
    return to_json(text)


def _value(text: str) -> Any:
    """The value that a text is in JSON or, as some models write it, in Python; None if neither."""
    try:
        value = from_json(text)
    except ValueError:
        try:
            with warnings.catch_warnings(action="ignore"):  # of unknown escapes in strings
                value = ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
            return None
    try:
        to_json(value)
    except (TypeError, ValueError, RecursionError):
        return None
    return value
