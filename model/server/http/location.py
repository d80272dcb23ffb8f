"""Where pydantic has found something in a request's body, as whoever wrote it would say it."""

from __future__ import annotations

import re
from collections.abc import Sequence

_NO_FIELDS = ("body", "query", "path")
_TYPES = re.compile(
    r"(str|int|float|bool|none|dict|list|nullable|constrained-\w+|[A-Z]\w*"
    r"|(function-\w+|tagged-union|union|literal|list|dict|nullable|lax-or-strict|json-or-python)"
    r"\[.*)",
    re.DOTALL,
)
"""Names that pydantic gives the alternatives of a value: types, and our classes."""
_TAGS = {
    *("system", "developer", "user", "assistant", "tool", "function", "served"),
    *("text", "image", "document", "tool_use", "tool_result", "thinking", "redacted_thinking"),
    *("message", "reasoning", "function_call", "custom_tool_call", "custom", "namespace"),
    *("function_call_output", "custom_tool_call_output", "tool_reference"),
    *("input_text", "output_text", "input_image", "input_file", "refusal", "summary_text"),
    *("reasoning_text", "allowed_tools"),
}
"""Roles and types stand in locations behind an index or a union, where they choose the model."""


def path_of(location: Sequence[str | int], body: object, named: bool = False) -> str | None:
    """`messages[0].content` of a location.

    Args:
        body: what it is a location in.
        named: its last part is a field, whatever it is called.
    """
    path, value, tagged = "", body, False
    for i, part in enumerate(location):
        last = named and i == len(location) - 1
        if isinstance(part, int):
            path, tagged = f"{path}[{part}]", False
            value = value[part] if isinstance(value, list) and part < len(value) else None
        elif i == 0 and part in _NO_FIELDS:
            continue
        elif not last and not tagged and _is_tag(part, location[i - 1], value):
            tagged = True
        elif last or not _TYPES.fullmatch(part):
            path += f".{part}" if path else part
            value = value.get(part) if isinstance(value, dict) else None
    return path or None


def _is_tag(part: str, before: str | int, value: object) -> bool:
    if part not in _TAGS or not (isinstance(before, int) or before.startswith("tagged-union")):
        return False
    # A function of chat's tools is in a field that is called as its type is.
    return part != "function" or not (isinstance(value, dict) and "function" in value)
