"""`pykernels eval`: what a change to a step costs the model; what the model knows."""

from __future__ import annotations

import typer

from .compare import compare
from .deferral import deferral
from .lossless import lossless
from .tasks import tasks

app = typer.Typer(
    help="Measure what a model knows, and what a change costs it.", no_args_is_help=True
)


@app.callback()
def group() -> None:
    """Measure what a model knows, and what a change costs it."""


app.command("tasks")(tasks)
app.command("compare")(compare)
app.command("deferral")(deferral)
app.command("lossless")(lossless)
