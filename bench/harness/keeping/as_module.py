"""`python -m bench.NAME` as `pykernels bench NAME`: the same command by either name."""

from __future__ import annotations

import sys


def run(name: str) -> None:
    """Runs the command with this process's arguments, and ends the process."""
    from model.cli.main import main

    sys.argv[:1] = ["pykernels", "bench", name]
    main()
