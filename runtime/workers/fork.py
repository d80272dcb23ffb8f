"""What a forked child may not use: threads do not survive a fork, so nobody would answer it."""

from __future__ import annotations

import os

from pykernels.errors import PykernelsError


def refuse_in_child(owner: int, what: str) -> None:
    """Raises PykernelsError in any process but the one with the id ``owner``.

    Args:
        what: has threads in that process: "the engine".
    """
    if os.getpid() != owner:
        raise PykernelsError(
            f"{what} belongs to the parent process; threads do not survive a fork",
            "Make it in the process that uses it, or start that with 'spawn'",
        )
