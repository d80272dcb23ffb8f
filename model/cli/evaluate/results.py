"""Where an evaluation's results go: the options that its commands share, and what they say."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from ..shared.common import err

AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, nothing else.")]
Write = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="Write a page, its numbers and its plots."),
]


def wrote(files: Iterable[Path]) -> None:
    """Names the files of ``--out``."""
    for file in files:
        err().print(f"wrote {file}", style="dim", markup=False)
