"""What was measured on this machine, kept in the cache folder, so that a start need not wait for
it."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from typing import Any

from pykernels.env import env

DAY = 24 * 3600.0


def kept(name: str, measure: Callable[[], Any], fits: Callable[[Any], bool]) -> Any:
    """What ``measure`` said at most a day ago, else what it says now: a value that JSON has.

    Args:
        name: of the file, without its ending: it must say all on which the value depends.
        fits: whether a kept value may be used. One that raises ``ValueError``, ``TypeError`` or
            ``LookupError`` says no.

    Raises:
        PykernelsError: what ``measure`` raises.
    """
    file = env.cache_dir / f"{name}.json"
    with contextlib.suppress(OSError, ValueError, TypeError, LookupError):
        age, stored = time.time() - file.stat().st_mtime, json.loads(file.read_text())
        if 0 <= age < DAY and fits(stored):
            return stored
    value = measure()
    fresh = file.with_name(f"{file.name}.{os.getpid()}.new")
    with contextlib.suppress(OSError):  # measured again the next time
        file.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_text(json.dumps(value))
        fresh.replace(file)
    return value
