"""What benches of decode steps have in common that hold them against predictions."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from model.cli.shared.execution import settled
from runtime.planning.config import ExecutionConfig

PredictedFor = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="By which steps are predicted: a YAML file, or a name in bench/machines.",
        show_default="this one, as measured",
    ),
]


def without_prompts(execution: ExecutionConfig) -> ExecutionConfig:
    """The settled configuration whose engine measures no way to read prompts: none is timed."""
    on_cpu = execution.on_gpu and execution.experts != "gpu"
    return replace(settled(execution), prefill="cpu" if on_cpu else "auto")
