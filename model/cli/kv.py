"""`pykernels kv`: what `serve --kv-disk` keeps."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from .shared.common import EXIT_PROBLEM, Debug, command, out, show

app = typer.Typer(no_args_is_help=True, help="See, check and remove what serve --kv-disk keeps.")

Directory = Annotated[
    Path, typer.Argument(metavar="DIR", help="What a server has as --kv-disk.", show_default=False)
]


@command
def ls(root: Directory, debug: Debug = False) -> None:
    """List what is kept of each model; what was of use last comes first."""
    from rich.table import Table

    from runtime.kv_tiers.blocks.contents import by_model, opened

    opened(root)
    table = Table("model", "folder", "pages", "states", "MiB", "last of use", box=None)
    for each in by_model(root):
        used = f"{datetime.fromtimestamp(each.used / 1e9):%Y-%m-%d %H:%M}" if each.used else ""
        size = f"{each.nbytes / 2**20:.1f}"
        table.add_row(each.model, each.name[:8], f"{each.pages}", f"{each.states}", size, used)
    show(table)


@command
def verify(
    root: Directory,
    remove: Annotated[bool, typer.Option("--remove", help="Remove damaged blocks.")] = False,
    debug: Debug = False,
) -> None:
    """Read every block, and name those that are damaged; exit code 1 if there are any. A server
    finds out by itself: it never uses one."""
    from runtime.kv_tiers.blocks.contents import damaged, opened

    opened(root)
    count = bad = 0
    for found in damaged(root):
        count += 1
        if found is not None:
            bad += 1
            out().print(f"{found.path}: {found.why}", markup=False)
            if remove:
                found.path.unlink(missing_ok=True)
    hint = "; --remove removes the others" if bad and not remove else ""
    out().print(f"{count - bad} of {count} blocks are whole{hint}")
    if hint:
        raise typer.Exit(EXIT_PROBLEM)


@command
def clear(root: Directory, debug: Debug = False) -> None:
    """Remove all blocks of all models. A server that runs computes anew."""
    from runtime.kv_tiers.blocks.contents import clear as clear_all

    out().print(f"{clear_all(root) / 2**20:.1f} MiB removed")


app.command("ls")(ls)
app.command("verify")(verify)
app.command("clear")(clear)
