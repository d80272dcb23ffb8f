"""`pykernels doctor`: what this machine can do and what stands in the way."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from .cli_common import EXIT_PROBLEM, Debug, command, err, out, prepare_threads


@command
def doctor(
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object on stdout, nothing else.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Look at this machine, test the kernels on it; exit code 1 with the mend if something lacks."""
    prepare_threads(None)
    from .doctor import examine

    with err().status("looking …", spinner_style="dim") as status:
        report = examine(progress=lambda what: status.update(f"{what} …"))
    if as_json:
        print(json.dumps(report.as_dict(), indent=2))
    else:
        report.show(out())
    if report.problems:
        raise typer.Exit(EXIT_PROBLEM)
