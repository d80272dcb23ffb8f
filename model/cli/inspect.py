"""`pykernels inspect`: what a model becomes, from its headers alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pykernels.errors import PykernelsError

from .common import Debug, command, out
from .session import Model, Rules, status


@command
def inspect(
    model: Model = None,
    rules: Rules = None,
    program: Annotated[
        bool, typer.Option("--program", help="The nodes of a decode step, in order.")
    ] = False,
    tokens: Annotated[
        int, typer.Option(min=1, metavar="T", help="Tokens of the step, at most.")
    ] = 8,
    debug: Debug = False,
) -> None:
    """Print the program that a step of the model is; no weight is read."""
    if not program:
        raise PykernelsError("there is nothing to inspect", "Add --program")
    with status("reading headers"):
        from .. import EMBEDDED
        from ..llm import outline_decoder

        decoder = outline_decoder(Path(model or EMBEDDED), rules)
        made = decoder.lower(tokens, tokens, tokens, 1, 1)
    out().print(str(made), markup=False, highlight=False, soft_wrap=True)
