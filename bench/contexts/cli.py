"""`pykernels bench contexts`: a table, a plot and JSON of decode steps by context."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from model.cli.shared.common import Debug, command, err
from model.cli.shared.options import Choose
from model.extras import check_plot
from pykernels.errors import PykernelsError
from runtime.planning.config import ExecutionConfig

from ..e2e.cli import check_gpu, described, open_model
from ..e2e.model_options import ModelOptions, count
from ..harness.keeping.kept import AsJson, Save, keeping
from ..harness.predicted import PredictedFor, without_prompts

CONTEXTS = "1024,4096,16384,32768,65536,131072"


@command
def contexts(
    chosen: Annotated[ModelOptions, Choose(but=("activations", "experts"))],
    execution: Annotated[
        ExecutionConfig, Choose(names={"experts": "expert_device"}, but=("defer", "prefill"))
    ],
    contexts: Annotated[
        str, typer.Option(metavar="N,M", help="Tokens in each sequence's cache.")
    ] = CONTEXTS,
    batches: Annotated[str, typer.Option(metavar="N,M", help="Sequences at once.")] = "1",
    defers: Annotated[
        str,
        typer.Option(
            metavar="off|N|auto,...", help="Of each an engine: experts that are deferred."
        ),
    ] = "off",
    steps: Annotated[int, count("Decode steps of each row.")] = 48,
    machine: PredictedFor = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Milliseconds by context, drawn.")
    ] = None,
    save: Save = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Time decode steps at growing contexts, and hold them against what `pykernels plan` predicts.

    Caches are filled with random keys, values and states: no prompt is read. Each batch and each
    number of deferred experts is an engine of its own, with room for the longest context.

    Example: pykernels bench contexts --arch qwen3-30b --layers 24 --device cuda:0
    --expert-device cpu --batches 1,8 --defers off,auto
    """
    chosen.check()
    check_plot(plot)
    sizes, sequences = parsed("contexts", contexts), parsed("batches", batches)
    numbers = tuple(dict.fromkeys(word.strip() for word in defers.split(",")))
    for number in numbers:
        replace(execution, defer=number)  # raises for what is no number of experts
    check_gpu(execution)
    execution = without_prompts(execution)
    from model.planner.machines import find_machine

    from .run import fitting, plan, rows

    there = find_machine(machine)
    with (
        keeping("contexts", save, as_json, plot) as kept,
        err().status("", spinner_style="dim") as status,
    ):
        status.update(chosen.doing)
        ours = open_model(chosen, execution, max(sizes) + 2 * steps + 256)
        try:
            fit = fitting(ours, sizes, sequences, steps)
            kept.head = {
                "model": ours.name,
                "format": ours.fmt,
                "layers": ours.layers,
                "vocab": chosen.vocab or 0,
                "threads": ours.pool.threads,
                "kv_dtype": ours.decoder.kv_dtype,
                **described(execution),
                "predicted_for": there.name,
            }
            kept.plan = plan(fit, sequences, numbers)
            step = lambda name: status.update(f"{name} …")  # noqa: E731
            asked = fit, sequences, numbers, steps
            for row in rows(ours, execution, there, *asked, kept.head, step):
                kept.add(row)
        finally:
            ours.close()


def parsed(name: str, text: str) -> tuple[int, ...]:
    """Numbers as they are typed, in order.

    Raises:
        PykernelsError: one is none, or below 1.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) for word in words):
        raise PykernelsError(f"--{name} {text}", "Give numbers from 1 on, such as 1024,8192")
    return tuple(sorted(set(map(int, words))))
