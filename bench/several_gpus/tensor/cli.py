"""`pykernels bench tensor`: its options, ways and files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from model.cli.shared.common import Debug, command
from model.cli.shared.execution import settled
from model.cli.shared.options import Choose
from model.extras import check_plot
from runtime.planning.config import ExecutionConfig
from runtime.planning.option import option

from ...e2e.cli import check_gpu, open_model
from ...e2e.model_options import ModelOptions
from ...harness.budget import Budget, Minutes, bar
from ...harness.keeping.kept import AsJson, Save, keeping
from ..ways import Way, check_several, count_gpus, named, numbers, on_first, on_some

GPUS = ("tensor", "pipeline")


@dataclass(frozen=True)
class Cases:
    """Which calls are timed, and how GPUs share the model."""

    prompts: str = option("512,4096", "Tokens of the prompts.", "N,M")
    batches: str = option("1,4", "Sequences that decode.", "N,M")
    context: int = option(512, "Tokens in each one's cache before.", "N", kind=int, least=1)
    tokens: int = option(64, "Decode steps.", "N", kind=int, least=2)
    counts: str | None = option(
        None, "So many GPUs share the model, after each other.", "N,M", shown="all of them"
    )
    rounds: int = option(3, "Of each, after one that warms up.", "N", kind=int, least=1)
    gpus: str = option(
        "tensor",
        "How all GPUs share the model: each has a part of every layer (tensor), some of the layers"
        " (pipeline), or both after each other.",
        "tensor|pipeline|tensor,pipeline",
    )


@command
def tensor(
    chosen: Annotated[ModelOptions, Choose(but=("activations",))],
    execution: Annotated[
        ExecutionConfig,
        Choose(
            only=("device", "kv_dtype", "threads", "kernel"), defaults={"device": "cuda:0,cuda:1"}
        ),
    ],
    cases: Cases,
    minutes: Minutes = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Tokens a second, drawn.")
    ] = None,
    save: Save = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Time a whole model, its experts too, on the first GPU and on all of them.

    The engines take turns, so a ratio is of calls some seconds apart. The model must fit on one
    GPU.

    pykernels bench tensor --arch qwen3-30b --format q4_k --prompts 512,4096 --batches 1,4
    """
    budget = Budget(minutes)
    chosen.check()
    check_several("tensor", execution)
    prompts = numbers("--prompts", cases.prompts, "512,4096")
    batches = numbers("--batches", cases.batches, "1,4")
    ways = _ways(execution, cases)
    check_plot(plot)
    check_gpu(execution, needed=True)
    execution = settled(execution)
    from runtime.profiling.engine_speed import EngineTimer, Load

    from ...e2e.ours import spin
    from ..turns import Part, decode, prompt, rows

    timed = [prompt(tokens, op="prompt") for tokens in prompts]
    timed += [decode(batch, cases.context, cases.tokens, op="decode") for batch in batches]
    load = Load(max(prompts), cases.tokens, max(batches), cases.context)

    def opened(way: Way) -> EngineTimer:
        run = replace(way.execution, threads=execution.threads, kernel=execution.kernel)
        timer = ours.timer(load, run)
        spin(ours.pool, "cuda")
        return timer

    part = Part(ways, timed, opened)
    work = part.work(cases.rounds)
    with keeping("tensor", save, as_json, plot) as kept, bar(work) as shown:
        shown.say(chosen.doing)
        ours = open_model(chosen, execution, max(prompts) + 2, "--prompts, --context or --tokens")
        try:
            kept.head = {
                "model": ours.name,
                "format": ours.fmt,
                "layers": ours.layers,
                "threads": ours.pool.threads,
                "device": execution.device,
                "kv_dtype": execution.kv_dtype,
                "context": cases.context,
                "steps": cases.tokens,
            }
            kept.plan = part.plan
            for row in rows(part, cases.rounds, budget, shown):
                kept.add(row)
            kept.stopped = "" if len(kept.rows) == len(kept.plan) else budget.why
        finally:
            ours.close()


def _ways(execution: ExecutionConfig, cases: Cases) -> list[Way]:
    """The first GPU, and several in each way of ``gpus``."""
    found = [Way("1 GPU", on_first(execution, experts="gpu"))]
    for each in named("--gpus", cases.gpus, GPUS):
        for some in on_some(execution, each, cases.counts, experts="gpu"):
            found.append(Way(f"{count_gpus(some.device)} GPUs, {each}", some))
    return found
