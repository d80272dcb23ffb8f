"""What a bench of levels prints, and its exit code."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from bench.harness.keeping.provenance import provenance
from pykernels.errors import PykernelsError


def printed(measure: Callable[[], dict[str, Any]], as_json: bool) -> int:
    """Prints what was measured, a line each, or one JSON object that says how; the exit code is 1
    where something was refused, or read wrong (``wrong``)."""
    try:
        found = measure()
    except (PykernelsError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    if as_json:
        print(json.dumps(provenance() | found))
    else:
        width = max(map(len, found))
        print("\n".join(f"{name:<{width}}  {value}" for name, value in found.items()))
    return int(found["wrong"] > 0)
