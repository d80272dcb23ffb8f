"""`pykernels plan`: what a model will do on a machine that need not be here."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from pykernels.errors import PykernelsError
from runtime.planning.config import CHOSEN, ExecutionConfig

from ..extras import check_plot
from ..planner.asked import Asked
from ..startup.lean_import import import_transformers
from .shared.common import Debug, command, out
from .shared.options import Choose
from .shared.session import status

_OPTIONS = Choose(
    only=(
        "device",
        "gpus",
        "gpu_shares",
        "experts",
        "expert_cache",
        "prefill",
        "dense_gib",
        "kv_gpu_gib",
        "kv_attention",
        "gpu_gib",
        "defer",
        "kv_dtype",
        "threads",
    ),
    defaults={"device": CHOSEN},
)


@command
def plan(
    asked: Asked,
    execution: Annotated[ExecutionConfig, _OPTIONS],
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Checkpoint folder, GGUF file, config.json, a shape's name like qwen3-30b, or a"
            " name on the hub, of which config.json is enough.",
        ),
    ],
    machine: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="YAML file of a machine, or the name of one in bench/machines.",
            show_default="this one, as measured",
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json", help="The decode step as a trace for ui.perfetto.dev."),
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(metavar="context|prompt|batch", help="A table over growing values besides."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="The sweep as a picture.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    debug: Debug = False,
) -> None:
    """Predict what MODEL will do on a machine: where it lies, how fast it is, and what bounds it.

    Only headers or config.json are read, and the machine need not be here: a file names its
    memory's and its GPU's rates. The steps that the engine would run are timed on these rates,
    kernel by kernel; so are those that check drafts, and it is told from how many right ones they
    pay. Below stands the line that serves the model so, and the three changes that would gain most.

    Example: pykernels plan deepseek-v3 --format q4_k --machine two-sockets.yaml --prompt 8192
    """
    if plot is not None and sweep is None:
        raise PykernelsError("--plot is of a --sweep", "Add --sweep context, or leave it out")
    check_plot(plot)
    with status("reading headers"):
        import_transformers()
        from runtime.devices.sim.routing import parse_routing

        from ..inspection.subject import open_subject
        from ..planner.changes import changes
        from ..planner.choose import best
        from ..planner.machines import find_machine
        from ..planner.predict import drafts_of
        from ..planner.report import as_dict, lines
        from ..planner.settings import Case, wanted_of
        from ..planner.sweep import check_swept, draw, told
        from ..planner.sweep import sweep as swept

        if sweep is not None:
            check_swept(sweep)
        law = parse_routing(asked.routing)
        there = find_machine(machine, execution.threads)
        subject = open_subject(model, asked.format, execution.kv_dtype, asked.layers, asked.vocab)
        wanted = wanted_of(asked, subject.positions, law)
        found = best(Case(subject, there, execution, wanted))
        drafts, gains = drafts_of(found), changes(found)
        points, ended = swept(found, sweep) if sweep else ([], "")
    if trace is not None:
        from ..planner.trace import write

        write(trace, found.decode, f"{model} on {there.name}", asked.batch)
    if plot is not None and sweep is not None:
        draw(points, sweep, f"{model} on {there.name}", plot)
    if as_json:
        rows = {"sweep": [asdict(point) for point in points], "sweep_ended": ended} if sweep else {}
        print(json.dumps(as_dict(found, drafts, gains) | rows, indent=2))
        return
    text = lines(found, drafts, gains)
    if sweep is not None:
        text += ["", *told(points, sweep, ended)]
    for line in text:
        out().print(line, markup=False)
