"""`pykernels bench dslp`: its options, ways and files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from model.cli.shared.common import Debug, command
from model.cli.shared.execution import settled
from model.cli.shared.options import Choose
from model.extras import check_plot
from runtime.planning.config import ExecutionConfig

from ...e2e.cli import check_gpu, open_model
from ...e2e.model_options import ModelOptions
from ...harness.budget import Budget, Minutes, bar
from ...harness.keeping.kept import AsJson, Save, keeping
from ..ways import check_several
from .prompts import Prompts, ways_of


@command
def dslp(
    chosen: Annotated[ModelOptions, Choose(but=("activations", "experts"))],
    execution: Annotated[
        ExecutionConfig,
        Choose(
            only=("device", "gpu_shares", "dense_gib", "kv_dtype", "threads", "kernel"),
            defaults={"device": "cuda:0,cuda:1"},
        ),
    ],
    prompts: Prompts,
    minutes: Minutes = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png", help="Speed, time and links by length, drawn."),
    ] = None,
    save: Save = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Time prompts whose experts stream from main memory: on the first GPU, and on all of them.

    The engines take turns, so a ratio is of prompts some seconds apart. Beside tokens a second and
    the time to the first token: GB/s of experts over each GPU's link, and bytes from one GPU to the
    other. With --arch and fewer layers than the model has, its whole depth is computed from them,
    and said so. The paper's own values (OSDI 2026, Figures 3, 6, 13 and 14) stand beside ours.

    pykernels bench dslp --arch qwen3-30b --layers 24 --vocab 32000 --lengths 4096,32768 --minutes 8
    """
    budget = Budget(minutes)
    chosen.check()
    check_several("dslp", execution)
    lengths = prompts.check()
    check_plot(plot)
    check_gpu(execution, needed=True)
    execution = replace(settled(execution), experts="cpu", prefill="stream")
    ways = ways_of(execution, prompts)
    from ..turns import rows
    from .parts import head_of, parts_of

    work = sum(lengths) * len(ways) * (prompts.rounds + 1) * (2 if prompts.thin else 1)
    with keeping("dslp", save, as_json, plot) as kept, bar(work) as shown:
        shown.say(chosen.doing)
        ours = open_model(chosen, execution, max(lengths) + 2, "--lengths")
        try:
            parts = parts_of(ours, execution, ways, lengths, prompts)
            kept.head = head_of(ours, chosen.arch, execution, lengths, prompts.thin)
            kept.plan = [row for part in parts for row in part.plan]
            for part in parts:
                for row in rows(part, prompts.rounds, budget, shown):
                    kept.add(row)
            kept.stopped = "" if len(kept.rows) == len(kept.plan) else budget.why
        finally:
            ours.close()
