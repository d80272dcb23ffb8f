"""Small stand-ins for a peer's process: real processes that speak the protocol."""

from __future__ import annotations

import sys


def stand_in(body: str) -> list[str]:
    """A command that says it is ready, then runs ``body`` for each request."""
    script = f"""
import json, sys, time
def say(**message): print(json.dumps(message), flush=True)
say(ready=True, versions={{"it": "1"}})
for line in sys.stdin:
    request = json.loads(line)
    {body}
"""
    return [sys.executable, "-c", script]
