"""`pykernels bench disagg`: its options and files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
from ..ways import Way
from .requests import Requests, ways_of

if TYPE_CHECKING:
    from runtime.runner.paged_runner import PagedRunner


@command
def disagg(
    chosen: Annotated[ModelOptions, Choose(but=("activations",))],
    execution: Annotated[
        ExecutionConfig,
        Choose(
            but=("gpus", "defer", "numa", "gpu_experts", "expert_cache_policy"),
            names={"experts": "expert_device"},
            defaults={"device": "cuda:0,cuda:1", "experts": "cpu"},
        ),
    ],
    requests: Requests,
    minutes: Minutes = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="All parts, drawn.")] = None,
    save: Save = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Time sequences that decode while long prompts are read: on one GPU, and on a GPU each.

    streams: N sequences alone, then beside long prompts: tokens a second, and milliseconds from
    token to token, the median and the longest (OSDI 2026, Figure 16). requests: prompts (P) and
    answers (D) that come at once, over each alone (Figure 18). behind: the first token of a short
    request that comes while a long prompt is read, and the longest wait between two tokens of a
    sequence that decodes meanwhile. With --device cuda:0 one GPU does all, with cpu the CPU.

    pykernels bench disagg --arch qwen3-30b --layers 24 --vocab 32000 --parts behind --minutes 5
    """
    budget = Budget(minutes)
    chosen.check()
    requests.check()
    check_plot(plot)
    if execution.device == "cpu":
        execution = replace(execution, experts="auto")
    check_gpu(execution)
    execution = settled(execution)
    ways = ways_of(execution, requests.yields)
    from .run import Room, plan, rows

    named = plan(ways, requests)
    with keeping("disagg", save, as_json, plot) as kept, bar(len(named)) as shown:
        shown.say(chosen.doing)
        ours = open_model(chosen, execution, requests.positions, requests.settings)
        room = Room.of(requests)
        try:
            kept.head = {
                "model": ours.name,
                "format": ours.fmt,
                "layers": ours.layers,
                "threads": ours.pool.threads,
                "device": execution.device,
                "expert_device": execution.experts,
                "context": requests.context,
                "prompt": requests.prompt,
                "behind": requests.behind,
                "short": requests.short,
            }
            kept.plan = named

            def opened(way: Way) -> PagedRunner:
                return ours.runner(room, way.execution, requests.budget)

            for row in rows(ways, opened, requests, budget, shown):
                kept.add(row)
            kept.stopped = "" if len(kept.rows) == len(named) else budget.why
        finally:
            ours.close()
