"""The command: what is compared, and where its page goes."""

from __future__ import annotations

import argparse
from pathlib import Path

from model.startup.lean_import import import_transformers

from .rows import RESULTS


def main() -> int:
    """Runs a comparison, and prints its page."""
    parser = argparse.ArgumentParser(prog="python -m bench.papers", description=__doc__)
    parser.add_argument("what", choices=("validate",))
    parser.add_argument("--out", type=Path, default=RESULTS / "papers", help="folder of pages")
    given = parser.parse_args()
    import_transformers()
    from .validate import page, validate

    print(page(validate(given.out)))
    return 0
