"""`pykernels inspect`: what a model becomes, from its headers alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pykernels.errors import PykernelsError
from runtime.planning.config import ExecutionConfig

from ..startup.lean_import import import_transformers
from .shared.common import Debug, command, out, show
from .shared.model_options import Eager, Rules
from .shared.options import Choose
from .shared.session import status

if TYPE_CHECKING:
    from ..inspection.examine import Inspection

_WIDE = 160
"""Columns of a table that goes to a pipe or a file: none is cut off."""


@command
def inspect(
    execution: Annotated[
        ExecutionConfig, Choose(only=("device", "experts", "gpu_experts", "gpu_gib"))
    ],
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Checkpoint folder, config.json, a shape's name like deepseek-v3, or a name on the"
            " hub, of which config.json is enough.",
            show_default="the embedded model",
        ),
    ] = None,
    rules: Rules = None,
    expert_cache: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="Slots of each layer for experts on the GPU, too."),
    ] = 0,
    eager: Eager = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object on stdout, every module in it.")
    ] = False,
    program: Annotated[
        bool, typer.Option("--program", help="The nodes of a decode step instead, in order.")
    ] = False,
    tokens: Annotated[
        int, typer.Option(min=1, metavar="T", help="Tokens of that step, at most.")
    ] = 8,
    debug: Debug = False,
) -> None:
    """Print MODEL's modules as they will be: class, device, format, bytes; no weight is read.

    What a token reads, and totals of each device, stand below. With --device or rules of GPUs it
    tells how it would be there, with the routed experts on the CPU unless --experts says gpu: no
    GPU is needed to ask.
    """
    if rules is None:
        execution.check_device()
    device, gpu_experts = execution.device, execution.gpu_experts
    where = "cpu" if execution.experts == "auto" else execution.experts
    if program and gpu_experts is not None:
        raise PykernelsError("--program has no --gpu-experts", "Leave one of them out")
    if execution.gpu_gib is not None and gpu_experts is None:
        raise PykernelsError(
            "--gpu-gib is for --gpu-experts here", "Add that, or ask pykernels plan what fits"
        )
    if program and as_json:
        raise PykernelsError("--program has no JSON", "Leave one of them out")
    with status("reading headers"):
        from .. import EMBEDDED
        from ..hub import local

        which = model or str(EMBEDDED)
        if "/" in which or Path(which).exists():  # no shape has a slash in its name
            which = str(local(which, weights=program))  # refuses a wrong path before the imports
        import_transformers()
        from ..inspection.examine import examine

        if program:
            from ..llm import placed_program

            placed = placed_program(Path(which), rules, device, where, tokens, expert_cache)
            out().print(str(placed), markup=False)
            return
        given = expert_cache, gpu_experts, execution.gpu_gib
        inspection = examine(which, rules, device, eager, where, *given)
    if as_json:
        print(json.dumps(inspection.as_dict(), indent=2))
    else:
        _show(inspection)


def _show(found: Inspection) -> None:
    from ..inspection.report import summary, table

    console = out()
    if not console.is_terminal:
        console.width = _WIDE
    console.print(f"{found.name} ({found.model_type}), from {found.source}", markup=False)
    console.print()
    show(table(found))
    console.print()
    for line in summary(found):
        console.print(line, markup=False)
