"""`pykernels bench drafts`: a table and JSON of steps by the drafts that they check."""

from __future__ import annotations

from typing import Annotated

from model.cli.shared.common import Debug, command, err
from model.cli.shared.options import Choose
from runtime.planning.config import ExecutionConfig

from ..e2e.cli import check_gpu, described, open_model
from ..e2e.model_options import ModelOptions, count
from ..harness.keeping.kept import AsJson, Save, keeping
from ..harness.predicted import PredictedFor, without_prompts


@command
def drafts(
    chosen: Annotated[ModelOptions, Choose(but=("activations", "experts"))],
    execution: Annotated[
        ExecutionConfig, Choose(names={"experts": "expert_device"}, but=("defer", "prefill"))
    ],
    most: Annotated[int, count("Drafts of a step, at most.")] = 4,
    context: Annotated[int, count("Tokens of the sequence.")] = 512,
    steps: Annotated[int, count("Steps of each round and number of drafts.")] = 24,
    rounds: Annotated[int, count("Rounds, in which all numbers of drafts take turns.")] = 4,
    machine: PredictedFor = None,
    save: Save = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Time steps that check drafts of one sequence, beside what `pykernels plan` predicts of them.

    How much longer than one without drafts such a step takes says how many of them must be right
    for drafts to pay.

    Example: pykernels bench drafts --arch qwen3-30b --layers 24 --device cuda:0
    --expert-device cpu
    """
    chosen.check()
    check_gpu(execution)
    execution = without_prompts(execution)
    from model.planner.machines import find_machine

    from .run import rows

    there = find_machine(machine)
    with (
        keeping("drafts", save, as_json) as kept,
        err().status("", spinner_style="dim") as status,
    ):
        status.update(chosen.doing)
        ours = open_model(
            chosen, execution, context + 4 * (steps + 8) * (1 + most), "--context or --steps"
        )
        try:
            kept.head = {
                "model": ours.name,
                "format": ours.fmt,
                "layers": ours.layers,
                "threads": ours.pool.threads,
                "context": context,
                **described(execution),
                "predicted_for": there.name,
            }
            kept.plan = [{"drafts": number} for number in range(1 + most)]
            asked = most, context, steps, rounds
            step = lambda name: status.update(f"{name} …")  # noqa: E731
            for row in rows(ours, execution, there, *asked, step):
                kept.add(row)
        finally:
            ours.close()
