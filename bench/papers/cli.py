"""The command: what is compared, and where its page goes."""

from __future__ import annotations

import argparse
import importlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from model.startup.lean_import import import_transformers

from .rows import RESULTS

PAPERS = ("sosp", "osdi", "smoe")


def main() -> int:
    """Runs a comparison, and prints its page."""
    parser = argparse.ArgumentParser(prog="python -m bench.papers", description=__doc__)
    parser.add_argument("what", choices=("validate", "routing", *PAPERS))
    parser.add_argument("--out", type=Path, default=RESULTS / "papers", help="folder of pages")
    given = parser.parse_args()
    import_transformers()
    if given.what == "validate":
        from .validate import as_dict
        from .validated import validate

        found, text = validate(given.out)
        _keep(given.out, given.what, as_dict(found))
        print(text)
        return 0
    if given.what == "routing":
        importlib.import_module(".smoe.choices", __package__).record_choices(given.out)
        return 0
    from .cells import draw, page

    paper = importlib.import_module(f".{given.what}", __package__)
    cells = paper.cells()
    given.out.mkdir(parents=True, exist_ok=True)
    text = page(paper.TITLE, paper.ABOUT_IT, cells, f"{given.what}.png", paper.UNEXPLAINED)
    (given.out / f"{given.what}.md").write_text(text)
    _keep(given.out, given.what, {"rows": [asdict(cell) for cell in cells]})
    draw(cells, given.out / f"{given.what}.png")
    print(text)
    return 0


def _keep(folder: Path, what: str, data: dict[str, Any]) -> None:
    """Writes a page's numbers beside it."""
    about = {"command": f"python -m bench.papers {what}", "machine": "simulated: bench/machines"}
    (folder / f"{what}.json").write_text(json.dumps(about | data, indent=1) + "\n")
