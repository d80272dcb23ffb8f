"""JSON and server-sent events as bytes."""

from __future__ import annotations

import json
from typing import Any

DONE = b"data: [DONE]\n\n"
SILENT = b": still here\n\n"


def json_bytes(value: Any) -> bytes:
    """Compact JSON. A lone surrogate, which UTF-8 cannot hold, becomes a question mark."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")


def frame(value: Any, event: str | None = None) -> bytes:
    """One event, of a name if it has one."""
    head = b"" if event is None else b"event: " + event.encode() + b"\n"
    return head + b"data: " + json_bytes(value) + b"\n\n"
