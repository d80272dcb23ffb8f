"""`pykernels profile`: what a model does, with a text or in a step."""

from __future__ import annotations

import typer

from ..shared.formats import ListsFormats
from .experts import experts
from .step import step

app = typer.Typer(
    no_args_is_help=True,
    help="See which experts a text takes, and what a step's time goes to.",
)
app.command("experts")(experts)
app.command("step", cls=ListsFormats)(step)
