"""`pykernels convert`: a checkpoint as a packed cache, which is mapped instead of loaded."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pykernels.errors import PykernelsError

from ..hub import local
from ..startup.lean_import import import_transformers
from .shared.common import Debug, command, err, out, prepare_threads, show
from .shared.execution import Workers
from .shared.model_options import Rules
from .shared.session import status

if TYPE_CHECKING:
    from rich.table import Table

    from ..conversion import Row

KINDS = ("experts", "attention", "mlp", "head")


@command
def convert(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SRC", help="Checkpoint, or its name on the hub; with --verify the cache."
        ),
    ],
    execution: Workers,
    target: Annotated[
        Path | None, typer.Argument(metavar="DST", help="Folder of the packed cache.")
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Of the routed experts:", show_default="as they are stored"
        ),
    ] = None,
    linears: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Format of the other matrices; routers and embeddings stay.",
            show_default="as they are stored",
        ),
    ] = None,
    rules: Rules = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare a cache with its checksums instead.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object on stdout, nothing else.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Write a checkpoint once in the layout that the kernels read; --model DST then maps it.

    A conversion that was interrupted goes on where it was. What converting to another format
    changes is reported layer by layer, as |converted - stored| / |stored|.
    """
    if verify:
        _verify(source, target)
        return
    if target is None:
        raise PykernelsError("there is no DST", "Give the folder that the packed cache goes to")
    source = local(source)
    chosen = prepare_threads(execution.threads)
    with status("importing torch and transformers"):
        import_transformers()
        from ..checkpoint.memory import size
        from ..conversion import convert as run

    rows = run(source, target, format, linears, rules, chosen)
    if as_json:
        print(json.dumps({"folder": str(target), "parts": [asdict(row) for row in rows]}))
        return
    show(_table(rows))
    total = size(sum(row.nbytes for row in rows))
    err().print(f"wrote {target}: {total}, each file with its checksums", markup=False)


def _verify(folder: Path, target: Path | None) -> None:
    if target is not None:
        raise PykernelsError("--verify takes one folder", "Give the packed cache alone")
    from ..checkpoint.memory import size
    from ..checkpoint.packed.verify import verify
    from ..checkpoint.progress import reporting

    with reporting(None, "verifying") as report:
        nbytes = verify(folder, report)
    out().print(f"{folder}: {size(nbytes)} are as they were written", markup=False)


def _table(rows: list[Row]) -> Table:
    from rich.table import Table

    from ..checkpoint.memory import size

    kinds = [kind for kind in KINDS if any(kind in row.errors for row in rows)]
    table = Table("part", "formats", box=None, pad_edge=False)
    for title in ("size", *(f"error of {kind}" for kind in kinds)):
        table.add_column(title, justify="right")
    for row in rows:
        formats = sorted(row.formats, key=lambda fmt: -row.formats[fmt])
        errors = (f"{row.errors[kind]:.2%}" if kind in row.errors else "" for kind in kinds)
        table.add_row(row.name, ", ".join(formats), size(row.nbytes), *errors)
    return table
